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
from jobs.run_state import COMPLETED, FAILED
from jobs.slurm import Slurm
from jobs.submit.plan import Job, PreviousRun
from jobs.submit.report import plain, varying_overrides
from jobs.submit.shape import shape_of
from jobs.submit.signature import signature_of
from trainer.base.errors import UserError

SITE_KEYS = ("cluster", "container")
"""Groups of the config that only the login node reads; a rank's frozen config doesn't hold them."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep as Hydra composed it."""

    index: int
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """Resolved, with the groups ``cluster`` and ``container``."""


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
    signature = signature_of(config | ({"user files": files} if files else {}))
    return Job(
        index=point.index,
        overrides=point.overrides,
        config=config,
        checked=checked,
        run=_run_folder(point, sweep_dir, signature),
        shape=shape_of(config | {key: point.config.get(key) for key in SITE_KEYS}),
        signature=signature,
    )


def _shared_folders(jobs: Sequence[Job]) -> list[str]:
    """A message for each job whose run folder another job of the sweep has."""
    problems = []
    first_job: dict[Path, int] = {}
    for job in jobs:
        if job.run in first_job:
            problems.append(
                f"jobs {first_job[job.run]} and {job.index} share the run folder {job.run}; leave "
                "trainer.default_local_dir out of the overrides, and each job gets its own in "
                "hydra.sweep.dir."
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
    """``trainer.default_local_dir`` if it was set for this job, else ``SWEEP/INDEX-SIGNATURE``."""
    if any(re.match(r"\+*trainer\.default_local_dir=", one) for one in point.overrides):
        return Path(os.path.abspath(point.config["trainer"]["default_local_dir"]))
    return Path(os.path.abspath(sweep_dir)) / f"{point.index:03d}-{signature[:8]}"


def previous_runs(path: Path, slurm: Slurm | None, signatures: set[str]) -> dict[str, PreviousRun]:
    """Earlier launches with these signatures, from the ledger at ``path``.

    A completed one wins over a live one, a live one over one that failed.
    """
    entries = [entry for entry in ledger.read(path) if entry.signature in signatures]
    states = states_of(entries, slurm)
    runs: dict[str, PreviousRun] = {}
    for entry in entries:
        state = states[entry.run].state
        lives = state not in (COMPLETED, *FAILED) and entry.job != ledger.LOCAL
        job = entry.job if lives else ""
        run = PreviousRun(run=Path(entry.run), state=state, name=entry.name, job=job)
        other = runs.get(entry.signature)
        if other is None or _rank(run.state) >= _rank(other.state):
            runs[entry.signature] = run
    return runs


def _rank(state: str) -> int:
    if state == COMPLETED:
        return 2
    return 0 if state in FAILED else 1
