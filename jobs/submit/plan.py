"""Which jobs of a sweep are submitted, in which arrays. Pure functions on resolved configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs.run_state import FAILED
from jobs.submit.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Job:
    """One point of a sweep."""

    index: int
    """Number in the sweep."""
    overrides: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    """Plain values of every key, resolved."""
    checked: Any = field(default=None, repr=False, compare=False)
    """The same as ``trainer.config.schema.Config``, from which the frozen file is written."""
    run: Path
    shape: Shape
    signature: str
    names_folder: bool = False
    """Whether ``trainer.default_local_dir`` was set for this job."""
    resumes: bool = False
    """Whether the run folder is that of an earlier launch, which it resumes."""


@dataclass(frozen=True, kw_only=True)
class PreviousRun:
    """An earlier launch with the same signature, from the ledger."""

    run: Path
    state: str
    name: str
    """Its name in ``python -m jobs``."""
    job: str = ""
    """Its Slurm job, while it is queued or runs."""


@dataclass(frozen=True, kw_only=True)
class JobBatch:
    """Jobs of one shape, which become one Slurm array."""

    name: str
    shape: Shape
    jobs: tuple[Job, ...]


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The arrays that a sweep submits."""

    batches: tuple[JobBatch, ...]
    skipped: tuple[tuple[Job, str], ...]
    """Jobs that are not submitted, and why."""

    @property
    def jobs(self) -> list[Job]:
        """All jobs that are submitted."""
        return [job for batch in self.batches for job in batch.jobs]

    def gpu_hours(self, timeout_min: float) -> float:
        """GPU-hours if every job uses the whole time limit of one attempt."""
        return sum(job.shape.gpus for job in self.jobs) * timeout_min / 60


def make_plan(
    jobs: Sequence[Job],
    *,
    max_array_size: int,
    resubmit: str,
    previous: Mapping[str, Sequence[PreviousRun]] | None = None,
) -> SweepPlan:
    """Group ``jobs`` by shape, in arrays of at most ``max_array_size``.

    Slurm's limit is one on the array *index*, so an array from 0 holds exactly that many. Jobs that
    were launched before are skipped or resume in their folder, see ``resubmit``: ``previous`` has
    the launches of each signature, the one that counts most first. Jobs that compute the same are
    one, unless they differ in where they are to run: cluster, image, a folder of their own.
    """
    selected: list[Job] = []
    skipped: list[tuple[Job, str]] = []
    first_index: dict[tuple[object, ...], int] = {}
    matched: set[Path] = set()
    for job in jobs:
        place = (job.signature, job.shape, job.run if job.names_folder else None)
        if place in first_index:
            other = first_index[place]
            skipped.append((job, f"the same config as job {other} of this sweep"))
            continue
        first_index[place] = job.index
        before = _previous(job, (previous or {}).get(job.signature, ()), matched)
        if before is None or resubmit == "always":
            selected.append(job)
        elif resubmit == "failed" and before.state in FAILED:
            selected.append(replace(job, run=before.run, resumes=True))
        else:
            job_text = f", Slurm job {before.job}" if before.job else ""
            reason = (
                f"launched before as {before.name} ({before.state}{job_text}); resubmit=always "
                "runs it anew"
            )
            skipped.append((job, reason))
    batches = _batches(selected, max(1, max_array_size))
    return SweepPlan(batches=tuple(batches), skipped=tuple(skipped))


def _previous(
    job: Job, candidates: Sequence[PreviousRun], matched: set[Path]
) -> PreviousRun | None:
    """The earlier launch of ``job`` that no other job has; for a job that names its folder only
    the one in that folder.
    """
    for candidate in candidates:
        is_other_folder = job.names_folder and candidate.run != job.run
        if candidate.run not in matched and not is_other_folder:
            matched.add(candidate.run)
            return candidate
    return None


def _batches(jobs: Sequence[Job], size: int) -> list[JobBatch]:
    by_shape: dict[Shape, list[Job]] = {}
    for job in jobs:
        by_shape.setdefault(job.shape, []).append(job)
    batches: list[JobBatch] = []
    for shape, members in by_shape.items():
        for start in range(0, len(members), size):
            name = f"{len(batches):03d}-{shape.label()}"
            part = tuple(members[start : start + size])
            batches.append(JobBatch(name=name, shape=shape, jobs=part))
    return batches
