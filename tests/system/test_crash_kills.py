"""kill -9 at random instants of a real two-rank training that saves every step.

No committed checkpoint is lost, and no uncommitted one is loaded. ``PLIMSOLL_KILLS`` sets the
number of kills (make crash: 1000).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.fork_server import ROOT, ForkServer, Ranks
from trainer.checkpoint.store import layout, manifest

KILLS = int(os.environ.get("PLIMSOLL_KILLS", "200"))

READER = """
import os, sys, pathlib, time
from trainer.checkpoint.store import manifest
root = pathlib.Path(sys.argv[1])
bad = []
reads = 0
parent = os.getppid()
print("ready", flush=True)
while not (root.parent / "stop").exists() and os.getppid() == parent:
    reads += 1
    time.sleep(0.001)  # otherwise it would take one of two cores from the ranks
    try:
        name = (root / "latest").read_text().strip()
    except FileNotFoundError:
        continue
    try:
        manifest.read(root / name)
    except manifest.DamagedError:
        # Retention may have removed it since; then `latest` names a newer one by now.
        if (root / "latest").read_text().strip() == name:
            bad.append(name)
print(reads, bad, flush=True)
"""


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    process = ForkServer()
    yield process
    process.close()


@pytest.fixture
def memory_folder() -> Iterator[Path]:
    """A folder in memory: the files left by a kill are the same, and saves are faster than on a
    slow disk.
    """
    in_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="plimsoll-", dir=in_memory))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_random_instants_lose_no_checkpoint(
    fork_server: ForkServer, memory_folder: Path
) -> None:
    run = memory_folder / "run"
    rng = random.Random(1)
    run.mkdir()
    root = run / layout.FOLDER
    reader = _start_reader(root)
    acknowledged = 0
    saved = 0
    try:
        for attempt in range(1, KILLS + 1):
            store = memory_folder / "store"
            log = memory_folder / f"log{attempt}"
            store.unlink(missing_ok=True)
            ranks = fork_server.start(
                "tests.checkpoint.rank_programs:endless", 2, [str(run), str(store), attempt], log
            )
            # Between the start and some time after the third commit.
            word, times = rng.choice(
                [(b"", 0), (b"restored", 1), *((b"committed", n) for n in (1, 1, 2, 3))]
            )
            _wait_for(log, word, times, ranks)
            time.sleep(rng.uniform(0, 0.15))
            assert ranks.alive(), f"attempt {attempt} ended by itself: {_logs_text(log)}"
            # With the writers: as if the node failed. Without: they go on writing as orphans.
            ranks.kill(writers=rng.random() < 0.5)
            log.touch()  # a rank may be killed before it opens its log
            words = [line.split() for line in log.read_text().splitlines()]
            restored = [int(w[1]) for w in words if w and w[0] == "restored"]
            assert not restored or restored[0] >= acknowledged, (
                f"attempt {attempt} went back to {restored}"
            )
            committed = [int(w[1]) for w in words if w and w[0] == "committed"]
            saved += len(committed)
            acknowledged = max([acknowledged, *restored, *committed])
            _check_steps(root, attempt, acknowledged)
            for path in [log, *memory_folder.glob(f"log{attempt}.*")]:
                path.unlink()
    finally:
        (run / "stop").touch()
        out = reader.communicate(timeout=30)[0]
    reads, bad = out.split(maxsplit=1)
    assert bad.strip() == "[]" and int(reads) > 100, f"latest named uncommitted steps: {out}"
    assert saved > KILLS // 2, (
        f"only {saved} checkpoints in {KILLS} attempts: the test has not tested much"
    )
    assert not list(root.glob("*.corrupt*"))


def _start_reader(root: Path) -> subprocess.Popen[str]:
    """Start a process that reads the latest checkpoint all the time."""
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    return reader


def _check_steps(root: Path, attempt: int, acknowledged: int) -> None:
    """Every checkpoint is whole, and step ``acknowledged`` or a newer one exists."""
    steps = layout.steps_on_disk(root)
    assert not steps or steps[0] >= acknowledged, (
        f"attempt {attempt} lost step {acknowledged}: {steps}"
    )
    for step in steps:
        folder = layout.step_dir(root, step)
        wrong = manifest.problems(folder, manifest.read(folder))
        assert not wrong, f"attempt {attempt}: {folder} is half a checkpoint: {wrong}"


def _wait_for(log: Path, word: bytes, times: int, ranks: Ranks) -> None:
    deadline = time.monotonic() + 60
    while times > 0 and (not log.exists() or log.read_bytes().count(word) < times):
        assert time.monotonic() < deadline and ranks.alive(), _logs_text(log)
        time.sleep(0.002)


def _logs_text(log: Path) -> str:
    """The ends of the ranks' tracebacks and of their log, for a message."""
    files = sorted(log.parent.glob(f"{log.name}.*.exit"))
    if log.exists():
        files.append(log)
    return "\n".join(file.read_text()[-3000:] for file in files)
