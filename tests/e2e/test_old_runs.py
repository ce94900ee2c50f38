"""Runs of an earlier version resume: their frozen configs, checkpoints, ledgers and records load.

``old_runs.tar.xz`` was written by commit dfc1c86. It holds a tiny model, a GRPO run of four steps
with its checkpoint of step 2 (``grpo``), a sweep of two SFT runs (``sweep``) and its ledger. Paths
within its files begin with ``/OLD``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import ROOT
from trainer.base.metrics_file import TIMING_PREFIXES, by_step
from trainer.config import load_frozen

ARCHIVE = Path(__file__).with_name("old_runs.tar.xz")
EQUAL = ("training/samples_seen", "training/epoch", "actor/lr")
"""Metrics that do not depend on the processor."""
CLOSE = ("actor/entropy", "response_length/mean", "batch/lower_bound")


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """The folder with the unpacked archive, as if it had been written here."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for path in tmp_path.rglob("*"):
        if path.suffix in (".yaml", ".jsonl", ".json", ".log") and path.is_file():
            path.write_text(path.read_text().replace("/OLD", str(tmp_path)))
    return tmp_path


def python_module(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def untimed(metrics: dict[str, Any]) -> set[str]:
    """The names of the metrics that don't depend on the clock."""
    return {name for name in metrics if not name.startswith(TIMING_PREFIXES)}


def test_frozen_configs_of_an_earlier_version_load(old: Path) -> None:
    for run in (old / "grpo", *sorted((old / "sweep").iterdir())):
        assert load_frozen(run).trainer.total_training_steps in (2, 4)


def test_a_run_of_an_earlier_version_resumes_from_its_checkpoint(old: Path) -> None:
    run = old / "grpo"
    before = by_step(run / "metrics.jsonl")
    done = python_module("trainer.worker", str(run), cwd=old)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert f"Going on from {run}/checkpoints/step_2 (step 2)" in output
    assert "another version" not in output
    after = by_step(run / "metrics.jsonl")
    assert list(after) == list(before) == [0, 1, 2, 3, 4]
    assert after[2] == before[2]
    for step in (3, 4):
        for name in EQUAL:
            assert after[step].get(name) == before[step].get(name), name
        for name in CLOSE:
            assert after[step][name] == pytest.approx(before[step][name], rel=0.2), name
        assert untimed(after[step]) >= untimed(before[step])  # dashboards keep their curves
    assert after[4]["goodput/productive_s"] > before[2]["goodput/productive_s"]


def test_a_ledger_of_an_earlier_version_is_read(old: Path) -> None:
    (old / "runs").mkdir()
    (old / "ledger.jsonl").rename(old / "runs" / "ledger.jsonl")
    done = python_module("jobs", "status", "--json", cwd=old)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["name"], row["state"], row["attempt"]) for row in rows] == [
        ("sweep/0", "COMPLETED", 1),
        ("sweep/1", "COMPLETED", 1),
    ]
    done = python_module("jobs", "compare", "sweep", "--metric", "train/loss", cwd=old)
    assert done.returncode == 0, done.stderr
    assert "6.24289" in done.stdout
