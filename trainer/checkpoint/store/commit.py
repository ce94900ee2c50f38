"""The commit protocol.

1. Each rank writes its files into ``step_N.tmp-<fence>`` and syncs each of them.
2. Rank 0, when all ranks are done, writes and syncs ``manifest.json``, syncs the folders, renames
   the temporary folder to ``step_N`` and syncs the parent folder. Now the checkpoint is committed.
3. Rank 0 replaces ``latest``: temporary file, fsync, rename, fsync of the parent folder.
4. Rank 0 removes the checkpoints that are no longer kept.

A crash at any point leaves the checkpoints that were committed before it intact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.file_writing import FileContents
from trainer.checkpoint.store.layout import LATEST, step_dir, temp_dir
from trainer.checkpoint.store.manifest import Manifest


class SnapshotBuffer(Protocol):
    """A host buffer with the files of one rank, complete or still being filled."""

    def __getitem__(self, part: slice, /) -> FileContents: ...


@dataclass(frozen=True)
class FileSpec:
    """A file of a rank: ``length`` bytes of the snapshot buffer from ``start`` on."""

    path: str
    start: int
    length: int


def write_files(
    disk: Disk, folder: Path, files: Sequence[FileSpec], data: SnapshotBuffer
) -> dict[str, list[object]]:
    """Step 1: write and sync the files. Returns name -> [bytes, [xxh3 of each chunk]]."""
    records: dict[str, list[object]] = {}
    for spec in files:
        path = folder / spec.path
        disk.makedirs(path.parent)
        digests = disk.write(path, data[spec.start : spec.start + spec.length])
        disk.fsync(path)
        records[spec.path] = [spec.length, digests]
    return records


def publish(disk: Disk, root: Path, manifest: Manifest, fence: str) -> Path:
    """Step 2: turn a complete temporary folder into a checkpoint. Returns its folder."""
    temp = temp_dir(root, manifest.step, fence)
    final = step_dir(root, manifest.step)
    data = manifest.encode()
    disk.write(temp / manifests.NAME, memoryview(data))
    disk.fsync(temp / manifests.NAME)
    sync_folders(disk, temp, manifest)
    if final.exists():
        # Only a run that went back to an older step gets here. Its earlier checkpoint of this step
        # is renamed rather than lost.
        disk.rename(final, unused_name(root, f"{final.name}.superseded"))
    try:
        disk.rename(temp, final)
    except OSError:
        # NFS repeats a rename whose answer was lost and reports the failure of the repetition:
        # look whether the folder is there.
        if not _has_contents(final / manifests.NAME, data):
            raise
    disk.fsync_dir(root)
    return final


def point_latest(disk: Disk, root: Path, step: int, fence: str) -> None:
    """Step 3: make ``latest`` name the checkpoint of ``step``."""
    temp = root / f"{LATEST}.tmp-{fence}"
    disk.write(temp, memoryview(f"step_{step}\n".encode()))
    disk.fsync(temp)
    disk.rename(temp, root / LATEST)
    disk.fsync_dir(root)


def remove(disk: Disk, root: Path, steps: Iterable[int]) -> None:
    """Step 4: remove checkpoints.

    A folder is renamed first: a crash in the middle leaves a ``.gone`` folder, never half a
    checkpoint.
    """
    for step in steps:
        gone = root / f"step_{step}.gone"
        disk.rmtree(gone)
        disk.rename(step_dir(root, step), gone)
        disk.fsync_dir(root)
        disk.rmtree(gone)


def sync_folders(disk: Disk, folder: Path, manifest: Manifest) -> None:
    """Make the names of the manifest's files durable in ``folder`` and its subfolders."""
    folders = {folder}
    for name in manifest.files:
        folders |= {path for path in (folder / name).parents if path.is_relative_to(folder)}
    for path in sorted(folders):
        disk.fsync_dir(path)


def unused_name(root: Path, name: str) -> Path:
    """``root / name``, with a number appended when that exists."""
    path = root / name
    number = 0
    while path.exists():
        number += 1
        path = root / f"{name}-{number}"
    return path


def _has_contents(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False
