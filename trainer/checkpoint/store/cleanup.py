"""Folders that are no checkpoints: leftovers of interrupted saves, damaged and superseded ones."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from trainer.checkpoint.store.commit import unused_name
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.layout import LATEST, read_latest, step_dir, steps_on_disk

_LEFTOVER = re.compile(r"(step_\d+|latest)\.tmp-.*|step_\d+\.gone|resumed_from\.tmp")


def remove_leftovers(disk: Disk, root: Path) -> list[str]:
    """Remove what interrupted saves and removals left behind. Returns the removed names, sorted.

    Only the holder of the run's lease may call this.
    """
    try:
        leftovers = [path for path in root.iterdir() if _LEFTOVER.fullmatch(path.name)]
    except OSError:
        return []
    removed = []
    for path in leftovers:
        # An orphaned writer may still be adding files to its folder: the next attempt removes it.
        with contextlib.suppress(OSError):
            if path.is_dir():
                disk.rmtree(path)
            else:
                disk.unlink(path)
            removed.append(path.name)
    return sorted(removed)


def quarantine(disk: Disk, folder: Path) -> Path:
    """Rename a damaged checkpoint to ``.corrupt``: kept for inspection, never loaded."""
    target = unused_name(folder.parent, f"{folder.name}.corrupt")
    _unpoint_latest(disk, folder.parent, [folder.name])
    disk.rename(folder, target)
    disk.fsync_dir(folder.parent)
    return target


def supersede(disk: Disk, root: Path, after: int) -> list[str]:
    """Rename the checkpoints newer than step ``after`` to ``.superseded``. Returns the new names.

    For a run that goes back to step ``after`` and will train those steps again.
    """
    steps = [step for step in steps_on_disk(root) if step > after]
    _unpoint_latest(disk, root, [f"step_{step}" for step in steps])
    names = []
    for step in steps:
        target = unused_name(root, f"step_{step}.superseded")
        disk.rename(step_dir(root, step), target)
        names.append(target.name)
    if names:
        disk.fsync_dir(root)
    return names


def _unpoint_latest(disk: Disk, root: Path, names: list[str]) -> None:
    """Remove ``latest`` if it points to one of ``names``, which are about to be renamed."""
    if read_latest(root) in names:
        disk.unlink(root / LATEST)
        disk.fsync_dir(root)
