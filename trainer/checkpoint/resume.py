"""Which checkpoint a run resumes from: the same on every rank, whole, or none for a reason."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainer.base.errors import Failure, UserError
from trainer.base.foreign import program_of
from trainer.base.json_files import read_word
from trainer.base.metrics_file import METRICS_FILE, last_value
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
    step_of,
    steps_on_disk,
)
from trainer.checkpoint.store.manifest import DamagedError, Manifest
from trainer.ranks.agreement import raise_on_all
from trainer.ranks.world import World

log = logging.getLogger(__name__)
RESUMED_FROM = "resumed_from"
"""A file with the path from which an attempt of this run has resumed."""
NFS_DELAY_S = 65.0
"""After how long a node of an NFS cluster sees a name that another node made (acdirmax, and some
more).
"""
POLL_S = 0.2
MISNAMED = "%s holds step %d, as its manifest says, and is not used: rename it to step_%d"
COMMITTED_METRIC = "ckpt/last_committed_step"
"""The newest committed step, as ``metrics.jsonl`` names it."""


def find_checkpoint(
    disk: Disk,
    run_dir: Path,
    settings: CheckpointSettings,
    world: World,
    fetch: Callable[[], None] = lambda: None,
) -> tuple[Path, Manifest] | None:
    """The checkpoint to resume from, verified: each rank reads its share of the files. Collective.

    None for a new run. A damaged checkpoint of the run is renamed ``.corrupt`` and the next older
    one is tried; after the first, ``fetch`` (collective) may get a whole copy from the mirror. A
    folder named after another step than its manifest's is left alone. Raises UserError for a
    ``resume_from_path`` that is damaged, for a newer format, for a file that this user may not
    read, and when a run that has had checkpoints has no whole one left; Failure for a file that
    can't be read for another reason, which may be whole.
    """
    root = run_dir / FOLDER
    if settings.resume_mode == "path":
        path = settings.resume_from_path
        if path is None:
            raise UserError(
                "trainer.resume_mode=path needs trainer.resume_from_path=FOLDER, a folder step_N "
                "of a run"
            )
        if not on_rank_0(lambda: was_resumed_from(root, path), world):
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
    """Whether an attempt of this run has resumed from ``path`` and has saved a step since.

    Raises OSError when that can't be read.
    """
    marker = root / RESUMED_FROM
    try:
        marker.stat()
    except FileNotFoundError:
        return False
    if not os.access(marker, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(marker))
    return read_word(marker) == path.strip() and bool(steps_on_disk(root))


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
    misnamed: set[int] = set()
    while steps:
        folder = step_dir(root, steps[0])
        manifest, problems = verify(folder, world)
        if manifest is not None and manifest.step != steps[0]:
            misnamed.add(steps[0])
            if world.rank == 0:
                log.error(MISNAMED, folder, manifest.step, manifest.step)
            steps = [step for step in steps if step not in misnamed]
            continue
        if manifest is not None and not problems:
            if world.rank == 0 and read_latest(root) != folder.name:
                with contextlib.suppress(OSError):  # a hint, which the next commit writes again
                    point_latest(disk, root, steps[0], "found")
            return folder, manifest
        on_rank_0(partial(set_aside, disk, folder, problems), world)
        if not fetched:
            fetch()
            fetched = True
        steps = [step for step in _steps(root, world) if step not in misnamed]
    _require_no_traces(run_dir, world)
    return None


def _require_no_traces(run_dir: Path, world: World) -> None:
    """Raise UserError when a run that has no whole checkpoint has had one."""
    traces = on_rank_0(lambda: _traces_of_checkpoints(run_dir), world)
    if traces:
        raise UserError(
            f"{run_dir} has trained before, but holds no whole checkpoint any more "
            f"({', '.join(traces)}); it will not start again at step 0 by itself: put its "
            "checkpoints back, set another trainer.experiment_name to start anew, or give a "
            "checkpoint of another run by trainer.resume_mode=path trainer.resume_from_path=FOLDER"
        )


def set_aside(disk: Disk, folder: Path, problems: list[str]) -> None:
    """Rename a damaged checkpoint. Raises OSError."""
    log.error("checkpoint %s is damaged: %s", folder, "; ".join(problems))
    corrupt = quarantine(disk, folder)
    log.error("kept as %s; going back to an older one", corrupt.name)


def on_rank_0(read: Callable[[], Any], world: World) -> Any:
    """What rank 0 reads from the disk, on every rank. Collective.

    Raises UserError or Failure, on all ranks, when it can't be read.
    """
    value: Any = None
    error: UserError | Failure | None = None
    if world.rank == 0:
        try:
            value = read()
        except OSError as caught:
            error = manifests.unreadable(caught)
    raise_on_all(world, error, elsewhere=Failure("rank 0 can't read the run's checkpoints"))
    return world.broadcast(value)


def _steps(root: Path, world: World) -> list[int]:
    """Steps of the run's checkpoints as rank 0 sees them, newest first."""
    steps: list[int] = on_rank_0(lambda: steps_on_disk(root), world)
    return steps


def _traces_of_checkpoints(run_dir: Path) -> list[str]:
    """Why a run without a whole checkpoint has had one; empty when it never reached its first.

    Names of what is left of checkpoints, and the step that its metrics call committed.
    """
    root = run_dir / FOLDER
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    traces = [name for name in names if name == LATEST or name.startswith("step_")]
    program = program_of(names)
    if program is not None:
        traces.append(f"{FOLDER}/ has a checkpoint of {program}")
    committed = last_value(run_dir / METRICS_FILE, COMMITTED_METRIC)
    if committed is not None and committed > 0:
        traces.append(f"{METRICS_FILE} says that step {committed:.0f} was committed")
    return traces


def _checkpoint_at(folder: Path, world: World) -> tuple[Path, Manifest]:
    """The checkpoint that ``resume_from_path`` names. Raises UserError when it isn't whole."""
    diagnosis = on_rank_0(lambda: diagnose(folder), world)
    if diagnosis:
        raise UserError(f"trainer.resume_from_path={folder} is no checkpoint: {diagnosis}")
    manifest, problems = verify(folder, world)
    if manifest is None or problems:
        raise UserError(
            f"trainer.resume_from_path={folder} is no whole checkpoint: {'; '.join(problems)}; "
            f"give a folder step_N whose {manifests.NAME} and files are intact"
        )
    if step_of(folder.name) not in (None, manifest.step) and world.rank == 0:
        log.warning("%s holds step %d, as its manifest says", folder, manifest.step)
    return folder, manifest


def verify(folder: Path, world: World) -> tuple[Manifest | None, list[str]]:
    """The manifest as rank 0 reads it, and what any rank found wrong with the files.

    Raises UserError for a newer format and for a file that this user may not read, Failure for one
    that can't be read for another reason.
    """
    answer: Manifest | Exception | None = None
    if world.rank == 0:
        try:
            answer = manifests.read(folder)
        except (DamagedError, UserError) as error:
            answer = error
        except OSError as error:
            answer = manifests.unreadable(error)
    answer = world.broadcast(answer)
    if isinstance(answer, UserError | Failure):
        raise answer
    if not isinstance(answer, Manifest):
        return None, [str(answer)]
    _wait_for_files(folder, answer, world)
    found: list[str] = []
    unreadable: UserError | Failure | None = None
    try:
        found = manifests.problems(folder, answer, (world.rank, world.size))
    except OSError as error:
        unreadable = manifests.unreadable(error)
    elsewhere = Failure(f"another rank can't read {folder}; its log names the file")
    raise_on_all(world, unreadable, elsewhere=elsewhere)
    return answer, [problem for problems in world.gather(found) for problem in problems]


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
