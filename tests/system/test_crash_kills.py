"""kill -9 at random instants of a real two-rank training that saves every step: nothing committed
is ever lost, nothing uncommitted is ever loaded. ``PLIMSOLL_KILLS`` sets how many (make crash:
1000).
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

from tests.checkpoint.zygote import ROOT, Ranks, Zygote
from trainer.checkpoint.store import commit, manifest

KILLS = int(os.environ.get("PLIMSOLL_KILLS", "200"))

READER = """
import os, sys, pathlib, time
from trainer.checkpoint import commit, manifest
root, bad, looks, parent = pathlib.Path(sys.argv[1]), [], 0, os.getppid()
print("ready", flush=True)
while not (root.parent / "stop").exists() and os.getppid() == parent:
    looks += 1
    time.sleep(0.001)  # without, it would take one of two cores from the ranks
    try:
        name = (root / "latest").read_text().strip()
    except FileNotFoundError:
        continue
    try:
        manifest.read(root / name)
    except manifest.Damaged:
        # Retention may have removed it since; then a newer one is named by now.
        if (root / "latest").read_text().strip() == name:
            bad.append(name)
print(looks, bad, flush=True)
"""


@pytest.fixture
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


@pytest.fixture
def memory() -> Iterator[Path]:
    """What a kill leaves behind doesn't depend on the disk; a slow one would only mean fewer saves
    per kill.
    """
    folder = Path(
        tempfile.mkdtemp(prefix="plimsoll-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    )
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_random_instants_lose_nothing(zygote: Zygote, memory: Path) -> None:
    run, chance = memory / "run", random.Random(1)
    run.mkdir()
    root = run / commit.FOLDER
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, str(root)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    acknowledged, saved = 0, 0
    try:
        for attempt in range(1, KILLS + 1):
            store, log = memory / "store", memory / f"log{attempt}"
            store.unlink(missing_ok=True)
            ranks = zygote.start(
                "tests.checkpoint.programs:endless", 2, [str(run), str(store), attempt], log
            )
            # From the very start to some way past the third commit.
            word, times = chance.choice(
                [(b"", 0), (b"restored", 1), *((b"committed", n) for n in (1, 1, 2, 3))]
            )
            _wait_for(log, word, times, ranks)
            time.sleep(chance.uniform(0, 0.15))
            assert ranks.alive(), f"attempt {attempt} ended by itself: {_why(log)}"
            # With the writers: the node is gone. Without: they are orphans that go on writing.
            ranks.kill(writers=chance.random() < 0.5)
            log.touch()  # killed before it was opened
            words = [line.split() for line in log.read_text().splitlines()]
            restored = [int(w[1]) for w in words if w and w[0] == "restored"]
            assert not restored or restored[0] >= acknowledged, (
                f"attempt {attempt} went back to {restored}"
            )
            committed = [int(w[1]) for w in words if w and w[0] == "committed"]
            saved += len(committed)
            acknowledged = max([acknowledged, *restored, *committed])
            steps = commit.steps_on_disk(root)
            assert not steps or steps[0] >= acknowledged, (
                f"attempt {attempt} lost step {acknowledged}: {steps}"
            )
            for step in steps:
                folder = commit.step_dir(root, step)
                wrong = manifest.problems(folder, manifest.read(folder))
                assert not wrong, f"attempt {attempt}: {folder} is half a checkpoint: {wrong}"
            for path in [log, *memory.glob(f"log{attempt}.*")]:
                path.unlink()
    finally:
        (run / "stop").touch()
        out = reader.communicate(timeout=30)[0]
    looks, bad = out.split(maxsplit=1)
    assert bad.strip() == "[]" and int(looks) > 100, f"latest named uncommitted steps: {out}"
    assert saved > KILLS // 2, (
        f"only {saved} checkpoints in {KILLS} attempts: the test has not tested much"
    )
    assert not list(root.glob("*.corrupt*"))


def _wait_for(log: Path, word: bytes, times: int, ranks: Ranks) -> None:
    until = time.monotonic() + 60
    while times > 0 and (not log.exists() or log.read_bytes().count(word) < times):
        assert time.monotonic() < until and ranks.alive(), _why(log)
        time.sleep(0.002)


def _why(log: Path) -> str:
    notes = sorted(log.parent.glob(f"{log.name}.*.exit"))
    return "\n".join(
        [p.read_text()[-3000:] for p in notes] + [log.read_text()[-3000:] if log.exists() else ""]
    )
