"""A sweep keeps what it writes to its owner, and passwords out of what people and records get."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEY = "0123456789abcdef0123456789abcdef01234567"
COMMON = (
    "hydra/launcher=slurm",
    "hydra.launcher.ledger=l/ledger.jsonl",
    "container=none",
    "cluster=generic",
    "cluster.local_folders=[]",
    "data=arithmetic",
    "actor_rollout_ref.model.path=builtin:tiny",
    "actor_rollout_ref.rollout.n=2",
)


def launch(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """``python -m trainer -m`` from a shell with the usual umask."""
    umask = os.umask(0o022)
    try:
        return subprocess.run(
            [sys.executable, "-m", "trainer", "-m", *COMMON, *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    finally:
        os.umask(umask)


def test_what_a_sweep_writes_is_closed_and_masked(fake: Path, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    done = launch(
        folder,
        "hydra.sweep.dir=a/sweep",
        f"data.system_prompt='ask http://me:{KEY}@host/'",
    )
    assert done.returncode == 0, done.stderr
    assert "http://me:***@host/" in done.stdout and KEY not in done.stdout + done.stderr
    holders = []
    for path in folder.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        if path.is_file() and KEY.encode() in path.read_bytes():
            holders.append(path.name)
    assert holders == ["config.yaml"]  # what the run itself needs
    assert "http://me:***@host/" in (folder / "l/ledger.jsonl").read_text()
    assert all(KEY not in script.read_text() for script in fake.glob("script*"))


def test_a_secret_for_a_script_is_refused_before_anything_is_written(
    fake: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    done = launch(folder, f"hydra.launcher.setup=['export WANDB_API_KEY={KEY}']")
    assert done.returncode == 2, done.stderr
    assert "hydra.launcher.setup holds a secret" in done.stderr
    assert "export the variable in the shell that submits" in done.stderr
    assert KEY not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert list(folder.iterdir()) == []


def test_a_wrong_sweep_is_one_message(fake: Path, tmp_path: Path) -> None:
    done = launch(tmp_path, "trainer.nnodes=-1,-2")
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
