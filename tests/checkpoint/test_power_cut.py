"""A recorded run of the commit protocol with a power cut after every operation.

In every state that the disk may then be in, what was acknowledged is there and whole. And each
single fsync is needed: without any one of them some state loses something.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.checkpoint.disks import TraceDisk
from tests.checkpoint.power_cut import FileSystemModel, Tree
from trainer.checkpoint import resume
from trainer.checkpoint.store import cleanup, commit, layout, manifest
from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.manifest import DamagedError, Manifest

FILES = [FileSpec("latest", 0, 5), FileSpec("global_step/weights.pt", 5, 40)]


def save(disk: Disk, root: Path, step: int, *, latest: bool = True, healthy: bool = True) -> None:
    """One rank's save in one process: the protocol's four steps."""
    fence = f"1-{step}"
    data = memoryview(bytes([step]) * 45)
    records = commit.write_files(disk, layout.temp_dir(root, step, fence), FILES, data)
    made = Manifest(
        step=step,
        attempt=1,
        world_size=1,
        zero_stage=0,
        config_hash="",
        created=0.0,
        healthy=healthy,
        files=records,  # type: ignore[arg-type]
    )
    commit.publish(disk, root, made, fence)
    if isinstance(disk, TraceDisk):
        disk.mark(f"committed {step}")
    if not latest:
        return
    commit.point_latest(disk, root, step, fence)
    if isinstance(disk, TraceDisk):
        disk.mark(f"latest {step}")


def record(tmp_path: Path, without: int | None = None) -> TraceDisk:
    """Three saves, the oldest removed after the third."""
    root = tmp_path / "recorded"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    disk = TraceDisk(without)
    for step in (1, 2, 3):
        save(disk, root, step)
    commit.remove(disk, root, [1])
    return disk


def violations(disk: TraceDisk, tmp_path: Path, limit: int) -> list[str]:
    """What is lost in any state that a power cut after any operation may leave."""
    model = FileSystemModel(tmp_path / "recorded")
    chance = random.Random(0)
    found = []
    committed = 0
    latest = 0
    seen: set[int] = set()
    for operation in disk.trace:
        if operation.kind == "mark":
            word, step = str(operation.path).split()
            if word == "committed":
                committed = int(step)
            else:
                latest = int(step)
        else:
            model.run(operation)
        for tree in model.outcomes(chance, limit):
            key = hash((committed, latest, tuple(sorted(tree.items(), key=lambda kv: kv[0]))))
            if key not in seen:
                seen.add(key)
                for problem in judge(tree, committed, latest):
                    found.append(f"after {operation.kind} {operation.path.name}: {problem}")
        if len(found) > 20:
            break
    return found


def judge(tree: Tree, committed: int, latest: int) -> list[str]:
    """The promises that ``tree`` breaks.

    What was acknowledged is there, whatever is named step_N is whole, ``latest`` names such a
    folder.
    """
    whole: set[int] = set()
    found = []
    for name in tree:
        if name.startswith("step_") and name.removeprefix("step_").isdigit():
            step = int(name.removeprefix("step_"))
            if _is_whole(tree, name):
                whole.add(step)
            elif step < 3 or committed >= step:
                found.append(f"{name} is damaged")
            else:
                found.append(f"{name} is half a checkpoint")
    if committed and max(whole, default=0) < committed:
        found.append(f"step {committed} was acknowledged and is lost; left: {sorted(whole)}")
    text = tree.get("latest")
    if text is not None or latest:
        name = (text or b"").decode(errors="replace").strip()
        number = name.removeprefix("step_")
        if not number.isdigit() or int(number) not in whole:
            found.append(f"latest names {name!r}")
        elif int(number) < latest:
            found.append(f"latest went back to {name}")
    return found


def _is_whole(tree: Tree, name: str) -> bool:
    body = tree.get(f"{name}/{manifest.NAME}")
    if body is None:
        return False
    try:
        made = manifest.parse(body, name)
    except DamagedError:
        return False
    for path, (size, digests) in made.files.items():
        data = tree.get(f"{name}/{path}")
        if data is None or len(data) != size or [xxh3_128_hexdigest(data)] != digests:
            return False
    return True


def test_every_state_after_a_power_cut_recovers(tmp_path: Path) -> None:
    assert violations(record(tmp_path), tmp_path, limit=4000) == []


@pytest.mark.parametrize("without", range(25))
def test_no_fsync_can_be_left_out(tmp_path: Path, without: int) -> None:
    disk = record(tmp_path, without)
    assert disk.fsyncs == 25, "the protocol has another number of fsyncs: update this test's range"
    assert violations(disk, tmp_path, limit=300), (
        f"fsync number {without} makes no difference: remove it, or test it"
    )


def test_the_model_matches_the_real_disk(tmp_path: Path) -> None:
    """Without a power cut the replayed trace is what lies on the disk."""
    disk = record(tmp_path)
    model = FileSystemModel(tmp_path / "recorded")
    for operation in disk.trace:
        if operation.kind != "mark":
            model.run(operation)
    tree = list(model.outcomes(random.Random(0), 4000))[-1]
    real = {
        str(p.relative_to(tmp_path / "recorded")): None if p.is_dir() else p.read_bytes()
        for p in (tmp_path / "recorded").rglob("*")
    }
    assert tree == real


def violations_of_going_back(tmp_path: Path, without: int | None = None) -> list[str]:
    """What is wrong after a power cut while the run supersedes step 3 and goes back to step 2."""
    disk = record(tmp_path)
    root = tmp_path / "recorded"
    before = len(disk.trace)
    disk._without = None if without is None else disk.fsyncs + without
    cleanup.supersede(disk, root, after=2)
    resume.write_resumed_from(disk, root, "here")
    model = FileSystemModel(root)
    found = []
    for number, operation in enumerate(disk.trace):
        if operation.kind != "mark":
            model.run(operation)
        if number < before:
            continue
        for tree in model.outcomes(random.Random(0), 4000):
            latest = tree.get(layout.LATEST)
            names_a_whole_one = latest is None or _is_whole(tree, latest.decode().strip())
            if not _is_whole(tree, "step_2") or not names_a_whole_one:
                found.append(f"latest names {latest!r}")
            resumed_from = tree.get(resume.RESUMED_FROM)
            if resumed_from is not None and (resumed_from != b"here" or "step_3" in tree):
                found.append("it would go on from the superseded step")
    return found


def test_going_back_survives_a_power_cut(tmp_path: Path) -> None:
    assert violations_of_going_back(tmp_path) == []


@pytest.mark.parametrize("without", range(3))
def test_going_back_needs_its_fsyncs(tmp_path: Path, without: int) -> None:
    assert violations_of_going_back(tmp_path, without), (
        f"fsync number {without} makes no difference: remove it, or test it"
    )
