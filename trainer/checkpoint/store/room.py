"""Room on the disk for the next checkpoint."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from trainer.checkpoint.store import commit
from trainer.checkpoint.store.catalog import Catalog
from trainer.checkpoint.store.disk import Disk

log = logging.getLogger(__name__)
FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors that room on the disk mends."""
LEAST_WHOLE = 2
"""Verified checkpoints that stay whatever the room: one may turn out to be damaged."""
TOLERANCE = 0.95
"""A checkpoint may be smaller than the one before by this; below it a save is not tried."""


def make_room(
    disk: Disk, root: Path, catalog: Catalog, removable: Sequence[int], *, at_least_one: bool
) -> str | None:
    """Remove checkpoints that retention would remove after the next commit, the oldest first,
    until the next one fits; ``LEAST_WHOLE`` verified ones stay.

    ``removable``: their steps, oldest first. ``at_least_one``: the last save ran out of room
    although the disk shows enough (a quota). Returns why the next one can't fit, or None. Raises
    OSError.
    """
    left = list(removable)
    needed = _expected_bytes(catalog)
    while at_least_one or disk.free_bytes(root) < needed:
        if not left or not _others_are_whole(catalog, left[0]):
            break
        step = left.pop(0)
        commit.remove(disk, root, [step])
        log.warning("no room for another checkpoint: step_%d is removed before the save", step)
        at_least_one = False
    free = disk.free_bytes(root)
    if free >= needed * TOLERANCE:
        return None
    return (
        f"{os.strerror(errno.ENOSPC)}: a checkpoint takes {needed / 1e9:.3g} GB and {root} has "
        f"{free / 1e9:.3g} GB left{_dispensable(root)}"
    )


def is_full(reason: str) -> bool:
    """Whether a save failed for want of room, by its message."""
    return any(os.strerror(number) in reason for number in FULL)


def _expected_bytes(catalog: Catalog) -> int:
    """Size of the newest checkpoint; 0 before the first."""
    return max((m.nbytes for m in list(catalog.checkpoints().values())[-1:]), default=0)


def _others_are_whole(catalog: Catalog, step: int) -> bool:
    """Whether ``LEAST_WHOLE`` verified checkpoints remain without ``step``."""
    whole = 0
    for other, manifest in reversed(catalog.checkpoints().items()):
        if other != step and manifest.healthy and catalog.is_whole(other):
            whole += 1
        if whole == LEAST_WHOLE:
            return True
    return False


def _dispensable(root: Path) -> str:
    """Names of folders that a user may want to delete."""
    names = [
        path.name
        for path in sorted(root.iterdir())
        if ".corrupt" in path.name or ".superseded" in path.name
    ]
    if not names:
        return ""
    return f"; {', '.join(names)} are kept for inspection only: delete them"
