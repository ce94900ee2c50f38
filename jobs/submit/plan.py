"""Which jobs of a sweep are submitted, in which arrays. Pure functions over resolved configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs.submit.shape import Shape

FAILED = ("FAILED", "CANCELLED", "EXHAUSTED", "LOST")
COMPLETED = "COMPLETED"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One point of a sweep."""

    index: int
    """Its number in the sweep."""
    overrides: tuple[str, ...]
    config: Mapping[str, Any] = field(repr=False)
    """Resolved: plain values of every key."""
    checked: Any = field(default=None, repr=False, compare=False)
    """The same as trainer.config's ``Config``, which writes the frozen file."""
    run: Path
    shape: Shape
    signature: str
    again: bool = False
    """The run folder is that of an earlier launch and goes on there."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """A launch of the same signature that the ledger knows."""

    run: Path
    state: str
    name: str
    """How ``python -m jobs`` names it."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Jobs of one shape that become one Slurm array."""

    name: str
    shape: Shape
    jobs: tuple[Job, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a sweep will do."""

    batches: tuple[Batch, ...]
    skipped: tuple[tuple[Job, str], ...]
    """Jobs that are not submitted, and why."""

    @property
    def jobs(self) -> list[Job]:
        """All jobs that are submitted."""
        return [job for batch in self.batches for job in batch.jobs]

    def gpu_hours(self, timeout_min: float) -> float:
        """GPU-hours if every job uses one attempt's whole time limit."""
        return sum(job.shape.gpus for job in self.jobs) * timeout_min / 60


def make_plan(
    jobs: Sequence[Job],
    *,
    max_array_size: int,
    resubmit: str,
    earlier: Mapping[str, Earlier] | None = None,
) -> Plan:
    """Group ``jobs`` by shape, in chunks of at most ``max_array_size`` (it caps Slurm's array
    *index*, so an array from 0 holds exactly that many). Jobs that were launched before are left
    out or go on in their folder, see ``resubmit``.
    """
    chosen: list[Job] = []
    skipped: list[tuple[Job, str]] = []
    seen: dict[str, int] = {}
    for job in jobs:
        if job.signature in seen:
            skipped.append((job, f"the same config as job {seen[job.signature]} of this sweep"))
            continue
        seen[job.signature] = job.index
        before = (earlier or {}).get(job.signature)
        if before is None or resubmit == "always":
            chosen.append(job)
        elif resubmit == "failed" and before.state in FAILED:
            chosen.append(replace(job, run=before.run, again=True))
        else:
            skipped.append(
                (
                    job,
                    f"launched before as {before.name} ({before.state}); resubmit=always runs it "
                    "anew",
                )
            )
    return Plan(batches=tuple(_batches(chosen, max(1, max_array_size))), skipped=tuple(skipped))


def _batches(jobs: Sequence[Job], size: int) -> list[Batch]:
    groups: dict[Shape, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job.shape, []).append(job)
    found: list[Batch] = []
    for shape, members in groups.items():
        for start in range(0, len(members), size):
            name = f"{len(found):03d}-{shape.label()}"
            found.append(Batch(name=name, shape=shape, jobs=tuple(members[start : start + size])))
    return found
