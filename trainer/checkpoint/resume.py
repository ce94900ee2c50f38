"""Which checkpoint a run resumes from: the same on every rank, whole, or none for a reason."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.json_files import read_word
from trainer.checkpoint.diagnose import diagnose
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.cleanup import quarantine, supersede
from trainer.checkpoint.store.commit import point_latest
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.layout import (
    FOLDER,
    LATEST,
    read_latest,
    step_dir,
    steps_on_disk,
)
from trainer.checkpoint.store.manifest import DamagedError, Manifest
from trainer.ranks.world import World

log = logging.getLogger(__name__)
RESUMED_FROM = "resumed_from"
"""A file with the path from which an attempt of this run has resumed."""
NFS_DELAY_S = 65.0
"""After how long a node of an NFS cluster sees a name that another node made (acdirmax, and some
more).
"""
POLL_S = 0.2


def find_checkpoint(
    disk: Disk,
    run_dir: Path,
    settings: CheckpointSettings,
    world: World,
    fetch: Callable[[], None] = lambda: None,
) -> tuple[Path, Manifest] | None:
    """The checkpoint to resume from, verified: each rank reads its share of the files. Collective.

    None for a new run. A damaged checkpoint of the run is renamed ``.corrupt`` and the next older
    one is tried; after the first, ``fetch`` (collective) may get a whole copy from the mirror.
    Raises UserError for a ``resume_from_path`` that is damaged, for a newer format, and when a run
    that has had checkpoints has no whole one left.
    """
    root = run_dir / FOLDER
    if settings.resume_mode == "path":
        path = settings.resume_from_path
        if path is None:
            raise UserError(
                "trainer.resume_mode=path needs trainer.resume_from_path=FOLDER, a folder step_N "
                "of a run"
            )
        if not world.broadcast(was_resumed_from(root, path) if world.rank == 0 else None):
            return _checkpoint_at(Path(path), world)
    if settings.resume_mode == "disable":
        steps = _steps(root, world)
        if steps:
            raise UserError(
                f"trainer.resume_mode=disable, but {root} holds step_{steps[0]}; set another "
                "trainer.experiment_name to start anew, or trainer.resume_mode=auto to go on"
            )
        return None
    return _newest_whole(disk, run_dir, world, fetch)


def was_resumed_from(root: Path, path: str) -> bool:
    """Whether an attempt of this run has resumed from ``path`` and has saved a step since."""
    return read_word(root / RESUMED_FROM) == path.strip() and bool(steps_on_disk(root))


def record_resume(
    disk: Disk, root: Path, settings: CheckpointSettings, folder: Path, step: int
) -> None:
    """Record that a run resumes from ``folder``, given by ``resume_from_path``, at ``step``.

    Renames the run's newer checkpoints, whose steps will be trained again, to ``.superseded``. The
    next attempt of the same command resumes from the run's own newest checkpoint.
    """
    path = settings.resume_from_path
    if settings.resume_mode != "path" or path is None or settings.val_only:
        return
    if was_resumed_from(root, path):
        return
    after = step if is_same_folder(folder.parent, root) else -1
    for name in supersede(disk, root, after):
        log.warning("the run goes on from %s; its own newer checkpoint is kept as %s", folder, name)
    write_resumed_from(disk, root, path)


def write_resumed_from(disk: Disk, root: Path, path: str) -> None:
    """Write the file that ``was_resumed_from`` reads."""
    temp = root / f"{RESUMED_FROM}.tmp"
    disk.write(temp, memoryview(path.encode()))
    disk.fsync(temp)
    disk.rename(temp, root / RESUMED_FROM)
    disk.fsync_dir(root)


def is_same_folder(one: Path, other: Path) -> bool:
    """Whether two paths name one folder."""
    return one.resolve() == other.resolve()


def _newest_whole(
    disk: Disk, run_dir: Path, world: World, fetch: Callable[[], None]
) -> tuple[Path, Manifest] | None:
    root = run_dir / FOLDER
    steps = _steps(root, world)
    fetched = False
    while steps:
        folder = step_dir(root, steps[0])
        manifest, problems = _verify(folder, world)
        if manifest is not None and not problems:
            if world.rank == 0 and read_latest(root) != folder.name:
                point_latest(disk, root, steps[0], "found")
            return folder, manifest
        if world.rank == 0:
            log.error("checkpoint %s is damaged: %s", folder, "; ".join(problems))
            corrupt = quarantine(disk, folder)
            log.error("kept as %s; going back to an older one", corrupt.name)
        if not fetched:
            fetch()
            fetched = True
        steps = _steps(root, world)
    traces = world.broadcast(_traces_of_checkpoints(root) if world.rank == 0 else None)
    if traces:
        raise UserError(
            f"{run_dir} has trained before, but holds no whole checkpoint any more "
            f"({', '.join(traces)}); it will not start again at step 0 by itself: set another "
            "trainer.experiment_name to start anew, or give a checkpoint of another run by "
            "trainer.resume_mode=path trainer.resume_from_path=FOLDER"
        )
    return None


def _steps(root: Path, world: World) -> list[int]:
    """Steps of the run's checkpoints as rank 0 sees them, newest first."""
    steps: list[int] = world.broadcast(steps_on_disk(root) if world.rank == 0 else None)
    return steps


def _traces_of_checkpoints(root: Path) -> list[str]:
    """Names of what is left of checkpoints; none in a run that never reached its first one."""
    try:
        names = sorted(path.name for path in root.iterdir())
    except OSError:
        return []
    return [name for name in names if name == LATEST or name.startswith("step_")]


def _checkpoint_at(folder: Path, world: World) -> tuple[Path, Manifest]:
    """The checkpoint that ``resume_from_path`` names. Raises UserError when it isn't whole."""
    diagnosis = world.broadcast(diagnose(folder) if world.rank == 0 else None)
    if diagnosis:
        raise UserError(f"trainer.resume_from_path={folder} is no checkpoint: {diagnosis}")
    manifest, problems = _verify(folder, world)
    if manifest is None or problems:
        raise UserError(
            f"trainer.resume_from_path={folder} is no whole checkpoint: {'; '.join(problems)}; "
            f"give a folder step_N whose {manifests.NAME} and files are intact"
        )
    return folder, manifest


def _verify(folder: Path, world: World) -> tuple[Manifest | None, list[str]]:
    """The manifest as rank 0 reads it, and what any rank found wrong with the files.

    Raises UserError for a newer format.
    """
    answer: Manifest | Exception | None = None
    if world.rank == 0:
        try:
            answer = manifests.read(folder)
        except (DamagedError, UserError) as error:
            answer = error
    answer = world.broadcast(answer)
    if isinstance(answer, UserError):
        raise answer
    if not isinstance(answer, Manifest):
        return None, [str(answer)]
    _wait_for_files(folder, answer, world)
    problems_of_ranks = world.gather(manifests.problems(folder, answer, (world.rank, world.size)))
    return answer, [problem for problems in problems_of_ranks for problem in problems]


def _wait_for_files(folder: Path, manifest: Manifest, world: World) -> None:
    """Wait until every rank sees the files that rank 0 sees.

    On NFS a node may learn a minute later of names that another node made. That is no damage.
    """
    deadline = time.monotonic() + NFS_DELAY_S
    while True:
        lacks = world.gather(_lacks_files(folder, manifest))
        rank_0_lacks = lacks[0]
        is_late = world.broadcast(time.monotonic() > deadline)
        if rank_0_lacks or not any(lacks) or is_late:
            return
        time.sleep(POLL_S)


def _lacks_files(folder: Path, manifest: Manifest) -> bool:
    try:
        os.listdir(folder.parent)  # makes an NFS client check whether its names still hold
        for name, (size, _) in manifest.files.items():
            if (folder / name).stat().st_size != size:
                return True
    except OSError:
        return True
    return False
