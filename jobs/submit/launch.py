"""From the points of a sweep to checked jobs. Nothing is written before all are validated."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.evidence import states_of
from jobs.run_state import COMPLETED, ENDED, FAILED
from jobs.slurm import Slurm
from jobs.submit.plan import Job, PreviousRun
from jobs.submit.report import plain, varying_overrides
from jobs.submit.shape import shape_of
from jobs.submit.signature import image_name, signature_of
from trainer.base.errors import UserError

SITE_KEYS = ("cluster", "container")
"""Groups of the config that only the login node reads; a rank's frozen config doesn't hold them."""

RESERVED = ("code", "cache", ".submitit")
"""Names in the sweep folder that are no run."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep as Hydra composed it."""

    index: int
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """Resolved, with the groups ``cluster`` and ``container``."""
    subdir: str | None = None
    """``hydra.sweep.subdir``, if it was set."""


def jobs_of(
    points: Sequence[Point], sweep_dir: Path, done: Callable[[int], None] = lambda count: None
) -> list[Job]:
    """Checked jobs with their run folders. ``done`` is called with the number of checked ones.

    Raises one UserError that lists what is wrong with every job.
    """
    jobs: list[Job] = []
    wrong: dict[str, list[Point]] = {}
    for count, point in enumerate(points, start=1):
        try:
            jobs.append(_job_of(point, sweep_dir))
        except UserError as error:
            wrong.setdefault(str(error), []).append(point)
        done(count)
    varying = varying_overrides({point.index: point.overrides for point in points})
    problems = [f"{_named(members, varying)}: {message}" for message, members in wrong.items()]
    problems += _shared_folders(jobs)
    if problems:
        raise UserError("\n".join(problems))
    return jobs


def _job_of(point: Point, sweep_dir: Path) -> Job:
    from trainer.config import load
    from trainer.config.user_files import file_digests, read_contents

    settings = {key: value for key, value in point.config.items() if key not in SITE_KEYS}
    checked = load(settings)
    # With every default and one spelling of every key.
    config = checked.model_dump(mode="json")
    # What the user's files say is part of what a run computes.
    files = file_digests(read_contents(checked))
    shape = shape_of(config | {key: point.config.get(key) for key in SITE_KEYS})
    hashed = config | ({"user files": files} if files else {})
    signature = signature_of(hashed, image_name(shape.container))
    return Job(
        index=point.index,
        overrides=point.overrides,
        config=config,
        checked=checked,
        run=_run_folder(point, sweep_dir, signature),
        shape=shape,
        signature=signature,
        names_folder=_names_folder(point),
    )


def _shared_folders(jobs: Sequence[Job]) -> list[str]:
    """A message for each job whose run folder another job of the sweep has."""
    problems = []
    first_job: dict[Path, int] = {}
    for job in jobs:
        if job.run in first_job:
            problems.append(
                f"jobs {first_job[job.run]} and {job.index} share the run folder {job.run}; leave "
                "trainer.default_local_dir and hydra.sweep.subdir out of the overrides, and each "
                "job gets its own in hydra.sweep.dir."
            )
        first_job.setdefault(job.run, job.index)
    return problems


def _named(points: Sequence[Point], varying: Mapping[int, Sequence[str]]) -> str:
    """``job 3 (lr=1)`` or ``job 3 (lr=1) and 11 more``: a mistake shared by jobs is one message."""
    first = points[0]
    overrides = " ".join(map(plain, varying[first.index])) or "no overrides"
    others = f" and {len(points) - 1} more" if len(points) > 1 else ""
    return f"job {first.index} ({overrides}){others}"


def _run_folder(point: Point, sweep_dir: Path, signature: str) -> Path:
    """``trainer.default_local_dir`` or ``SWEEP/hydra.sweep.subdir`` if one was set for this job,
    else ``SWEEP/INDEX-SIGNATURE``.

    Raises UserError when both were set, and for a subdir that holds something else.
    """
    sweep = Path(os.path.abspath(sweep_dir))
    if _names_folder(point):
        if point.subdir is not None:
            raise UserError(
                "trainer.default_local_dir and hydra.sweep.subdir both name the run folder; leave "
                "one out."
            )
        return Path(os.path.abspath(point.config["trainer"]["default_local_dir"]))
    if point.subdir is None:
        return sweep / f"{point.index:03d}-{signature[:8]}"
    run = Path(os.path.abspath(sweep / point.subdir))
    reserved = [sweep / name for name in RESERVED]
    if run == sweep or run in sweep.parents or any(one in (run, *run.parents) for one in reserved):
        raise UserError(
            f"hydra.sweep.subdir={point.subdir} is no folder for a run: {run} holds other files of "
            "the sweep; give each job one of its own, e.g. "
            "'hydra.sweep.subdir=${hydra.job.override_dirname}'."
        )
    return run


def _names_folder(point: Point) -> bool:
    return any(re.match(r"\+*trainer\.default_local_dir=", one) for one in point.overrides)


def previous_runs(
    path: Path, slurm: Slurm | None, signatures: set[str]
) -> dict[str, list[PreviousRun]]:
    """Earlier launches with these signatures, from the ledger at ``path``.

    Those that completed come first, then those that live, then those that failed; the newer ones
    before the older ones.
    """
    entries = [entry for entry in ledger.read(path) if entry.signature in signatures]
    states = states_of(entries, slurm)
    runs: dict[str, list[PreviousRun]] = {}
    for entry in entries:
        state = states[entry.run].state
        lives = state not in ENDED and entry.job != ledger.LOCAL
        job = entry.job if lives else ""
        run = PreviousRun(run=Path(entry.run), state=state, name=entry.name, job=job)
        runs.setdefault(entry.signature, []).insert(0, run)
    for candidates in runs.values():
        candidates.sort(key=lambda run: -_rank(run.state))
    return runs


def _rank(state: str) -> int:
    if state == COMPLETED:
        return 2
    return 0 if state in FAILED else 1
