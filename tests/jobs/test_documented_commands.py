"""Every fenced command of the README and the docs runs as it is typed, from a fresh shell.

Commands for a cluster meet a fake Slurm as dry runs, runs train with a stand-in for the ranks, and
``make`` only prints what it would do. The files that a command names lie in the current folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from jobs import ledger
from jobs.hydra_entry import launch_on_slurm
from jobs.records import append_line
from tests.jobs.conftest import point

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OLD_RUNS = ROOT / "tests/e2e/old_runs.tar.xz"
NEEDS_NETWORK = ("trainer.tracking.rebuild RUN --online",)
QUESTION = {"question": "What is 2 + 2?", "answer": "#### 4"}


def fenced(page: Path, language: str) -> list[str]:
    """The contents of a page's fenced blocks in one language."""
    blocks: list[str] = []
    inside: str | None = None
    for line in page.read_text().splitlines(keepends=True):
        if line.startswith("```"):
            opens = inside is None
            inside = line[3:].strip() if opens else None
            if opens and inside == language:
                blocks.append("")
        elif inside == language:
            blocks[-1] += line
    return blocks


def commands() -> list[str]:
    """The commands of all pages, each once, continuation lines joined and comments cut."""
    found: dict[str, None] = {}
    for page in PAGES:
        for block in fenced(page, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                text = re.sub(r"\s+#.*$", "", line).strip()
                if text:
                    found[re.sub(r"\s+", " ", text)] = None
    return list(found)


def test_every_block_says_its_language() -> None:
    """A command in a block without a language would not be tried."""
    for page in PAGES:
        for block in fenced(page, ""):
            assert not re.search(r"^(python|make|\. |source )", block, re.MULTILINE), page.name


@pytest.fixture
def place(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything that the commands name: ``RUN``, ``SWEEP``, ``MODEL``, data."""
    folder = tmp_path / "place"
    folder.mkdir()
    with tarfile.open(OLD_RUNS) as archive:
        archive.extractall(tmp_path / "old", filter="data")
    for path in (tmp_path / "old").rglob("*.yaml"):
        path.write_text(path.read_text().replace("/OLD", str(tmp_path / "old")))
    shutil.copytree(tmp_path / "old/grpo", folder / "RUN")
    for model in ("MODEL", "runs/demo/sft/huggingface"):
        shutil.copytree(tmp_path / "old/model", folder / model)
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text((json.dumps(QUESTION) + "\n") * 64)
    (folder / "run_qwen3_8b.sh").write_text("python -m verl.trainer.main_ppo data.seed=1\n")
    (folder / ".venv").symlink_to(sys.prefix)
    monkeypatch.chdir(folder)
    settings = {"ledger": "runs/ledger.jsonl", "timeout_min": 60, "signal_delay_s": 30}
    points = [point(index, data__seed=index) for index in range(4)]
    assert launch_on_slurm(points, settings, folder / "SWEEP") == 0
    for entry in ledger.read(folder / "runs/ledger.jsonl"):
        row = {"step": 1, "critic/score/mean": 0.5}
        (Path(entry.run) / "metrics.jsonl").write_text(json.dumps(row) + "\n")
        (Path(entry.run) / "wandb.json").write_text("{}")
        logs = Path(entry.run) / "logs/attempt_2"
        logs.mkdir(parents=True)
        (logs / "rank_0.log").write_text("said\n")
        line = {"attempt": 2, "launch": entry.launch, "cause": "error", "why": "error: x"}
        append_line(Path(entry.run) / "attempts.jsonl", line)
    return folder


def as_tried(command: str) -> str:
    """The command, dry where it needs a cluster, with what stands for an argument filled in."""
    command = command.replace("trainer.plan ...", "trainer.plan experiment=demo_grpo")
    command = command.replace("RUN/checkpoints/step_400", "RUN/checkpoints/step_2")
    if command.startswith("make "):
        return f"make -n -C {ROOT} {command.removeprefix('make ')}"
    if "-m trainer -m " in command:
        # This test's folder lies in /tmp, which a site's nodes don't share.
        return f"{command} hydra.launcher.dry_run=true cluster.local_folders=[]"
    if "-m jobs status" in command or "-m jobs logs" in command:
        return command.replace(" -f", "")
    if "-m jobs sync" in command:
        return f"{command} --dry-run"
    return command


@pytest.mark.parametrize("command", commands())
def test_a_documented_command_runs_as_typed(command: str, place: Path, fake: Path) -> None:
    if any(words in command for words in NEEDS_NETWORK):
        command = re.sub(r" RUN .*", " --help", command)
    environment = {
        "HOME": str(place.parent),
        "PATH": f"{fake.parent / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "FAKE": str(fake),
        "PLIMSOLL_WORKER_MODULE": "tests.jobs.standin",
        "STANDIN_STEP_S": "0",
        "WANDB_MODE": "offline",
        "OMP_NUM_THREADS": "1",
    }
    for name in ("PLIMSOLL_CACHE", "HF_HOME", "TORCH_EXTENSIONS_DIR"):
        if name in os.environ:
            environment[name] = os.environ[name]
    done = subprocess.run(
        ["bash", "-c", as_tried(command)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        stdin=subprocess.DEVNULL,
    )
    # An image that isn't there yet is what the doctor is for.
    expected = 1 if "jobs doctor" in command else 0
    assert done.returncode == expected, f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_python_runs(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(fenced(page, "python")):
        file = tmp_path / f"block_{number}.py"
        file.write_text(block)
        done = subprocess.run(
            [sys.executable, str(file)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=250,
        )
        assert done.returncode == 0, f"{page.name}:\n{block}\n{done.stderr[-1500:]}"
