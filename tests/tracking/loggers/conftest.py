"""A run folder with a record, and the packages of the loggers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from trainer.base.metrics_file import MetricsFile

PACKAGES = Path(sys.prefix) / "loggers"
"""Where ``make loggers`` puts them: beside the other packages, with which some disagree."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps, with texts of step 2."""
    folder = tmp_path / "run"
    (folder / "generations").mkdir(parents=True)
    (folder / "config.yaml").write_text(
        "actor_rollout_ref: {rollout: {n: 2}}\n"
        "trainer:\n  project_name: plim\n  experiment_name: best\n  seed: 3\n"
    )
    (folder / "generations/step_2.jsonl").write_text('{"prompt": "1+1=", "answer": "a|b"}\n')
    file = MetricsFile(folder / "metrics.jsonl", 0)
    for line in LINES:
        file.append(line)
    file.close()
    return folder


LINES = (
    {"step": 1, "time": 10.0, "reward/mean": 0.25, "val/acc/mean@4": 0.5, "note": "a text"},
    {"step": 2, "time": 20.0, "reward/mean": float("nan"), "actor/lr": 1e-6},
    {"step": 2, "time": 21.0, "val/reward": 0.75},
    {"step": 3, "time": 30.0, "reward/mean": 0.5},
)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which the loggers' packages are found, here and in new processes."""
    if not PACKAGES.is_dir():
        pytest.skip("the loggers' packages aren't installed; make loggers installs them")
    monkeypatch.syspath_prepend(str(PACKAGES))
    monkeypatch.setenv("PYTHONPATH", f"{PACKAGES}:{os.environ.get('PYTHONPATH', '')}")
    return dict(os.environ)
