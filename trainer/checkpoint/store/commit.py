"""The commit protocol on one screen. What is on disk is a checkpoint exactly when its folder is
named ``step_N`` and its manifest verifies; ``latest`` is a hint for people and other tools.

1. each rank: files into ``step_N.tmp-<fence>``, fsync each
2. rank 0, when all ranks are done: manifest.json, fsync; fsync the folders; rename to ``step_N``; fsync the parent
3. ``latest``: temp, fsync, rename, fsync the parent
4. retention
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.disk import Bytes, Disk
from trainer.checkpoint.store.manifest import Damaged, Manifest

FOLDER = "checkpoints"
LATEST = "latest"
_STEP = re.compile(r"step_(\d+)")
_TEMP = re.compile(r"(step_\d+|latest)\.tmp-.*|step_\d+\.gone|resumed_from\.tmp")


class Memory(Protocol):
    """A snapshot, or one that is still being filled."""

    def __getitem__(self, part: slice, /) -> Bytes: ...


@dataclass(frozen=True)
class FileSpec:
    """One file of a rank: ``length`` bytes of the snapshot from ``start`` on."""

    path: str
    start: int
    length: int


def step_dir(root: Path, step: int) -> Path:
    """Where a committed checkpoint lies."""
    return root / f"step_{step}"


def temp_dir(root: Path, step: int, fence: str) -> Path:
    """Where it grows. ``fence``, the attempt and a random part, keeps a forgotten writer of an
    earlier attempt, which may still be at work, from touching what this one publishes.
    """
    return root / f"step_{step}.tmp-{fence}"


def write_files(
    disk: Disk, folder: Path, files: Sequence[FileSpec], data: Memory
) -> dict[str, list[object]]:
    """Step 1: write and fsync; name -> [bytes, [xxh3 of each chunk]]."""
    records: dict[str, list[object]] = {}
    for spec in files:
        path = folder / spec.path
        disk.makedirs(path.parent)
        digests = disk.write(path, data[spec.start : spec.start + spec.length])
        disk.fsync(path)
        records[spec.path] = [spec.length, digests]
    return records


def publish(disk: Disk, root: Path, manifest: Manifest, fence: str) -> Path:
    """Step 2: from a complete temp folder to a committed checkpoint. Returns its folder."""
    temp, final = temp_dir(root, manifest.step, fence), step_dir(root, manifest.step)
    path = temp / manifests.NAME
    data = manifest.encode()
    disk.write(path, memoryview(data))
    disk.fsync(path)
    for folder in sorted(
        {p for name in manifest.files for p in (temp / name).parents if p.is_relative_to(temp)}
    ):
        disk.fsync_dir(folder)
    if final.exists():
        # Only a run that went back to an older step comes here; what it overtakes is set aside, not
        # lost.
        disk.rename(final, _free_name(root, f"{final.name}.superseded"))
    try:
        disk.rename(temp, final)
    except OSError:
        # NFS repeats a rename whose answer was lost, and then reports the repetition's failure: see
        # what is there.
        if not _holds(final / manifests.NAME, data):
            raise
    disk.fsync_dir(root)
    return final


def point_latest(disk: Disk, root: Path, step: int, fence: str) -> None:
    """Step 3."""
    temp = root / f"{LATEST}.tmp-{fence}"
    disk.write(temp, memoryview(f"step_{step}\n".encode()))
    disk.fsync(temp)
    disk.rename(temp, root / LATEST)
    disk.fsync_dir(root)


def remove(disk: Disk, root: Path, steps: Iterable[int]) -> None:
    """Step 4. A folder loses its name first: a crash in the middle leaves rubbish, never half a
    checkpoint.
    """
    for step in steps:
        gone = root / f"step_{step}.gone"
        disk.rmtree(gone)
        disk.rename(step_dir(root, step), gone)
        disk.fsync_dir(root)
        disk.rmtree(gone)


def steps_on_disk(root: Path) -> list[int]:
    """Steps of the folders named ``step_N``, newest first."""
    try:
        names = [p.name for p in root.iterdir() if p.is_dir()]
    except OSError:
        return []
    return sorted((int(m[1]) for name in names if (m := _STEP.fullmatch(name))), reverse=True)


def newest_whole(root: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that verifies completely."""
    for step in steps_on_disk(root):
        folder = step_dir(root, step)
        try:
            manifest = manifests.read(folder)
        except Damaged:
            continue
        if not manifests.problems(folder, manifest):
            return folder, manifest
    return None


def clean(disk: Disk, root: Path) -> list[str]:
    """Remove what interrupted saves and removals left. Only the holder of the run's lease may call
    this.
    """
    try:
        found = [p for p in root.iterdir() if _TEMP.fullmatch(p.name)]
    except OSError:
        return []
    removed = []
    for path in found:
        # An orphaned writer may still be adding files to its folder: then it stays for the next
        # attempt to remove.
        with contextlib.suppress(OSError):
            disk.rmtree(path) if path.is_dir() else disk.unlink(path)
            removed.append(path.name)
    return sorted(removed)


def quarantine(disk: Disk, folder: Path) -> Path:
    """Rename a damaged checkpoint to ``.corrupt``: kept for a look, never loaded."""
    target = _free_name(folder.parent, f"{folder.name}.corrupt")
    _unname(disk, folder.parent, [folder.name])
    disk.rename(folder, target)
    disk.fsync_dir(folder.parent)
    return target


def set_aside(disk: Disk, root: Path, after: int) -> list[str]:
    """A run goes on from step ``after``: its newer checkpoints belong to a future that will not
    come.
    """
    names, steps = [], [step for step in steps_on_disk(root) if step > after]
    _unname(disk, root, [f"step_{step}" for step in steps])
    for step in steps:
        target = _free_name(root, f"step_{step}.superseded")
        disk.rename(step_dir(root, step), target)
        names.append(target.name)
    if names:
        disk.fsync_dir(root)
    return names


def named(root: Path) -> str | None:
    """The folder that ``latest`` names."""
    try:
        return (root / LATEST).read_text().strip()
    except OSError:
        return None


def _unname(disk: Disk, root: Path, names: list[str]) -> None:
    """These are about to lose their names: ``latest`` must not send anybody there."""
    if named(root) in names:
        disk.unlink(root / LATEST)
        disk.fsync_dir(root)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _free_name(root: Path, name: str) -> Path:
    number, path = 0, root / name
    while path.exists():
        number += 1
        path = root / f"{name}-{number}"
    return path
