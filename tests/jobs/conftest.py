"""A fake Slurm on PATH, and points of a sweep without Hydra."""

from __future__ import annotations

import json
import os
import shlex
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.submit.launch import Point

FAKES = {
    # Notes the script and answers like Slurm; the file ``refuse`` makes it refuse.
    "sbatch": """
REFUSE=$(cat "$FAKE/refuse" 2>/dev/null)
[ -z "$REFUSE" ] || { echo "sbatch: error: $REFUSE" >&2; exit 1; }
env > "$FAKE/sbatch.env"
[ "$1" = --test-only ] && { echo "sbatch: Job 7 to start at noon" >&2; exit 0; }
n=$(ls "$FAKE" | grep -c '^script'); cp "${@: -1}" "$FAKE/script$n"
echo "Submitted batch job $((100 + n))"
""",
    "squeue": 'cat "$FAKE/squeue" 2>/dev/null; true',
    "sacct": 'cat "$FAKE/sacct" 2>/dev/null; true',
    "scancel": 'echo "scancel $*" >> "$FAKE/calls"',
    "sinfo": """
case "$*" in
  *%P*) printf 'low*\\nhigh\\n' ;;
  *%G*) echo "gpu:${GPUS:-8}" ;;
  *"-N"*%N) cat "$FAKE/nodes" 2>/dev/null ;;
esac
""",
    "scontrol": """
case "$*" in
  "show config") echo "MaxArraySize            = ${MAX_ARRAY:-1001}" ;;
  "show partition"*)
    echo "PartitionName=low GraceTime=10 MaxTime=${MAX_TIME:-UNLIMITED} TotalNodes=32" ;;
  "show node"*) echo "   NodeAddr=10.0.0.7 NodeHostName=n1 Version=22.05" ;;
  "show hostnames"*) printf 'n1\nn2\n' ;;
  "show job"*)
    cat "$FAKE/job" 2>/dev/null || echo "JobId=1 JobState=RUNNING Restarts=0 PreemptTime=None" ;;
  *) echo "scontrol $*" >> "$FAKE/calls" ;;
esac
""",
    # One task, without srun's own arguments.
    "srun": """
for arg in "$@"; do case $arg in --output=*) out=${arg#--output=} ;; esac; done
while [ "${1#-}" != "$1" ]; do shift; done
export SLURM_PROCID=0 SLURM_NTASKS=1 SLURM_LOCALID=0; out=${out//%t/0}
if [ -n "$out" ]; then exec "$@" >> "$out" 2>&1; else exec "$@"; fi
""",
}


def put(folder: Path, name: str, text: str) -> Path:
    """An executable bash script."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def put_fake(fake: Path, name: str, text: str) -> Path:
    """A command of the fake Slurm; it knows the folder ``fake`` where no variable reaches it."""
    return put(fake.parent / "bin", name, f"export FAKE={shlex.quote(str(fake))}\n{text}")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake's folder: what was submitted lies in ``scriptN``, what was called in ``calls``."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, text in FAKES.items():
        put_fake(folder, name, text)
    for name in [n for n in os.environ if n.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FAKE", str(folder))
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def point(
    index: int = 0, *overrides: str, cluster: dict[str, Any] | None = None, **settings: Any
) -> Point:
    """A point whose config has ``settings``, dotted names written with two underscores."""
    config: dict[str, Any] = {
        "data": {"task": "arithmetic"},
        "actor_rollout_ref": {"model": {"path": "builtin:tiny"}, "rollout": {"n": 2}},
        "trainer": {"total_training_steps": 20},
        "cluster": {"local_folders": [], "check_gpus": False, "min_free_disk_gb": 0.0}
        | (cluster or {}),
        "container": None,
    }
    for name, value in settings.items():
        at = config
        *path, last = name.split("__")
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return Point(
        index=index,
        overrides=overrides or tuple(f"{k}={v}" for k, v in settings.items()),
        config=config,
    )


def until(true: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition, at most ``seconds``."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.01)


def calls(fake: Path) -> str:
    """What the fake was asked to do."""
    path = fake / "calls"
    return path.read_text() if path.exists() else ""


def read_ledger(path: Path) -> list[dict[str, Any]]:
    """Raw lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]
