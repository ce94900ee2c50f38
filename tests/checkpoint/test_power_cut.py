"""A recorded run of the protocol, cut off after every operation, in every state that the disk may
then be in: what was acknowledged is there and whole. And each single fsync is needed: without any
one of them some state loses something.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from tests.checkpoint.power import Machine
from tests.checkpoint.shims import TraceDisk
from trainer.checkpoint import resume as finding
from trainer.checkpoint.store import commit, manifest
from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.manifest import Damaged, Manifest

FILES = [FileSpec("latest", 0, 5), FileSpec("global_step/weights.pt", 5, 40)]


def save(disk: Disk, root: Path, step: int, *, latest: bool = True) -> None:
    """One rank's save in one process: the protocol's four steps."""
    fence = f"1-{step}"
    data = memoryview(bytes([step]) * 45)
    records = commit.write_files(disk, commit.temp_dir(root, step, fence), FILES, data)
    made = Manifest(
        step=step,
        attempt=1,
        world_size=1,
        zero_stage=0,
        config_hash="",
        created=0.0,
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
    """What is lost in any state after any operation of the trace."""
    machine, chance, found = Machine(tmp_path / "recorded"), random.Random(0), []
    committed = latest = 0
    seen: set[int] = set()
    for op in disk.trace:
        if op.kind == "mark":
            word, step = str(op.path).split()
            committed, latest = (
                (int(step), latest) if word == "committed" else (committed, int(step))
            )
        else:
            machine.run(op)
        for tree in machine.outcomes(chance, limit):
            key = hash((committed, latest, tuple(sorted(tree.items(), key=lambda kv: kv[0]))))
            if key not in seen:
                seen.add(key)
                found += [
                    f"after {op.kind} {op.path.name}: {problem}"
                    for problem in judge(tree, committed, latest)
                ]
        if len(found) > 20:
            break
    return found


def judge(tree: dict[str, bytes | None], committed: int, latest: int) -> list[str]:
    """The promises: what was acknowledged is there, whatever is named step_N is whole, ``latest``
    names such a one.
    """
    whole, found = set(), []
    for name in tree:
        if name.startswith("step_") and name.removeprefix("step_").isdigit():
            step = int(name.removeprefix("step_"))
            if _whole(tree, name):
                whole.add(step)
            elif step < 3 or committed >= step:
                found.append(f"{name} is damaged")
            else:
                found.append(f"{name} is half a checkpoint")
    if committed and max(whole, default=0) < committed:
        found.append(f"step {committed} was acknowledged and is lost; left: {sorted(whole)}")
    text = tree.get("latest")
    if text is not None or latest:
        named = (text or b"").decode(errors="replace").strip()
        if (
            not named.removeprefix("step_").isdigit()
            or int(named.removeprefix("step_")) not in whole
        ):
            found.append(f"latest names {named!r}")
        elif int(named.removeprefix("step_")) < latest:
            found.append(f"latest went back to {named}")
    return found


def _whole(tree: dict[str, bytes | None], name: str) -> bool:
    body = tree.get(f"{name}/{manifest.NAME}")
    if body is None:
        return False
    try:
        made = manifest.parse(body, name)
    except Damaged:
        return False
    return all(
        (data := tree.get(f"{name}/{path}")) is not None
        and len(data) == size
        and [xxh3_128_hexdigest(data)] == digests
        for path, (size, digests) in made.files.items()
    )


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
    machine = Machine(tmp_path / "recorded")
    for op in disk.trace:
        if op.kind != "mark":
            machine.run(op)
    tree = list(machine.outcomes(random.Random(0), 4000))[-1]
    real = {
        str(p.relative_to(tmp_path / "recorded")): None if p.is_dir() else p.read_bytes()
        for p in (tmp_path / "recorded").rglob("*")
    }
    assert tree == real


def gone_back(tmp_path: Path, without: int | None = None) -> list[str]:
    """What is wrong in any state after a power cut while the run leaves step 3 behind and goes on
    from step 2.
    """
    disk, root = record(tmp_path), tmp_path / "recorded"
    before, disk._without = len(disk.trace), None if without is None else disk.fsyncs + without
    commit.set_aside(disk, root, after=2)
    finding.note_resumed_from(disk, root, "here")
    machine, found = Machine(root), []
    for number, op in enumerate(disk.trace):
        if op.kind != "mark":
            machine.run(op)
        for tree in machine.outcomes(random.Random(0), 4000) if number >= before else ():
            named = tree.get(commit.LATEST)
            if not _whole(tree, "step_2") or (
                named is not None and not _whole(tree, named.decode().strip())
            ):
                found.append(f"latest names {named!r}")
            note = tree.get(finding.RESUMED)
            if note is not None and (note != b"here" or "step_3" in tree):
                found.append("it would go on from the step that it left")
    return found


def test_going_back_survives_a_power_cut(tmp_path: Path) -> None:
    assert gone_back(tmp_path) == []


@pytest.mark.parametrize("without", range(3))
def test_going_back_needs_its_fsyncs(tmp_path: Path, without: int) -> None:
    assert gone_back(tmp_path, without), (
        f"fsync number {without} makes no difference: remove it, or test it"
    )
