"""Which checkpoint a run goes on from: the same on every rank, whole, or none with a reason."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.checkpoint.diagnose import what_is
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import commit
from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.commit import FOLDER
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.manifest import Damaged, Manifest
from trainer.ranks.small_exchanges import Ranks

log = logging.getLogger(__name__)
RESUMED = "resumed_from"
LATE_S = 65.0
"""A node of an NFS cluster may see a name that another node made so much later (acdirmax, and
some).
"""
POLL_S = 0.2


def find(
    disk: Disk,
    run_dir: Path,
    settings: CheckpointSettings,
    ranks: Ranks,
    fetch: Callable[[], None] = lambda: None,
) -> tuple[Path, Manifest] | None:
    """The folder to restore from, verified: each rank reads its share of the files. Collective.

    A damaged folder of the run is renamed ``.corrupt`` and the next older one is tried; after the
    first, ``fetch`` (collective) may get a whole copy from elsewhere. Raises UserError for a
    ``resume_from_path`` that is damaged, and when a run that has had checkpoints has none left.
    """
    root = run_dir / FOLDER
    if settings.resume_mode == "path":
        path = settings.resume_from_path
        if path is None:
            raise UserError(
                "trainer.resume_mode=path needs trainer.resume_from_path=FOLDER, a folder step_N "
                "of a run"
            )
        if not ranks.told(was_resumed_from(root, path) if ranks.rank == 0 else None):
            return _given(Path(path), ranks)
    steps = _steps(root, ranks)
    if settings.resume_mode == "disable":
        if steps:
            raise UserError(
                f"trainer.resume_mode=disable, but {root} holds step_{steps[0]}; set another "
                "trainer.experiment_name "
                "to start anew, or trainer.resume_mode=auto to go on"
            )
        return None
    damaged = 0
    while steps:
        folder = commit.step_dir(root, steps[0])
        manifest, wrong = _check(folder, ranks)
        if manifest is not None and not wrong:
            if ranks.rank == 0 and commit.named(root) != folder.name:
                commit.point_latest(disk, root, steps[0], "found")
            return folder, manifest
        if ranks.rank == 0:
            log.error("checkpoint %s is damaged: %s", folder, "; ".join(wrong))
            log.error(
                "kept as %s; going back to an older one", commit.quarantine(disk, folder).name
            )
        damaged += 1
        if damaged == 1:
            fetch()
        steps = _steps(root, ranks)
    lost = ranks.told(_lost(root) if ranks.rank == 0 else None)
    if lost:
        raise UserError(
            f"{run_dir} has trained before, but holds no whole checkpoint any more "
            f"({', '.join(lost)}); it will not "
            "start again at step 0 by itself: set another trainer.experiment_name to start anew, "
            "or give a checkpoint "
            "of another run by trainer.resume_mode=path trainer.resume_from_path=FOLDER"
        )
    return None


def _steps(root: Path, ranks: Ranks) -> list[int]:
    steps: list[int] = ranks.told(commit.steps_on_disk(root) if ranks.rank == 0 else None)
    return steps


def _lost(root: Path) -> list[str]:
    """Signs of checkpoints that were: a run that never reached its first one has none of them and
    starts at 0.
    """
    try:
        names = sorted(p.name for p in root.iterdir())
    except OSError:
        return []
    return [n for n in names if n == commit.LATEST or n.startswith("step_")]


def was_resumed_from(root: Path, path: str) -> bool:
    """Whether an earlier attempt of this run already began at ``path`` and has a checkpoint of its
    own since.
    """
    try:
        return (root / RESUMED).read_text() == path and bool(commit.steps_on_disk(root))
    except OSError:
        return False


def note_resumed_from(disk: Disk, root: Path, path: str) -> None:
    """Remember it."""
    temp = root / f"{RESUMED}.tmp"
    disk.write(temp, memoryview(path.encode()))
    disk.fsync(temp)
    disk.rename(temp, root / RESUMED)
    disk.fsync_dir(root)


def same_folder(one: Path, other: Path) -> bool:
    """Whether two paths name one folder."""
    return one.resolve() == other.resolve()


def _given(folder: Path, ranks: Ranks) -> tuple[Path, Manifest]:
    if foreign := ranks.told(what_is(folder) if ranks.rank == 0 else None):
        raise UserError(f"trainer.resume_from_path={folder} is no checkpoint: {foreign}")
    manifest, wrong = _check(folder, ranks)
    if manifest is None or wrong:
        raise UserError(
            f"trainer.resume_from_path={folder} is no whole checkpoint: {'; '.join(wrong)}; give a "
            "folder step_N whose "
            f"{manifests.NAME} and files are intact"
        )
    return folder, manifest


def _check(folder: Path, ranks: Ranks) -> tuple[Manifest | None, list[str]]:
    """The manifest as rank 0 reads it, and what any rank found wrong with the files."""
    answer: Any = None
    if ranks.rank == 0:
        try:
            answer = manifests.read(folder)
        except (Damaged, UserError) as error:
            answer = error
    answer = ranks.told(answer)
    if isinstance(answer, UserError):
        raise answer
    if isinstance(answer, Damaged):
        return None, [str(answer)]
    _await_names(folder, answer, ranks)
    wrong = ranks.everyones(manifests.problems(folder, answer, (ranks.rank, ranks.size)))
    return answer, [problem for part in wrong for problem in part]


def _await_names(folder: Path, manifest: Manifest, ranks: Ranks) -> None:
    """Files that rank 0 has and another rank doesn't: on NFS a node learns of names that others
    made up to a minute later. Wait for that rather than call it damage.
    """
    until = time.monotonic() + LATE_S
    while True:
        unseen = ranks.everyones(_unseen(folder, manifest))
        if unseen[0] or not any(unseen) or ranks.told(time.monotonic() > until):
            return
        time.sleep(POLL_S)


def _unseen(folder: Path, manifest: Manifest) -> bool:
    try:
        os.listdir(folder.parent)  # makes an NFS client ask whether its names still hold
        return any(
            (folder / name).stat().st_size != size for name, (size, _) in manifest.files.items()
        )
    except OSError:
        return True
