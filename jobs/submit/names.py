"""What runs are called: in the ledger, where a name is one run's, and in W&B. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from jobs.ledger import Entry
from jobs.submit.plan import Job
from jobs.submit.report import plain, short, varying_overrides

LONGEST = 120
"""Letters of a run's name in W&B, which takes 128."""
EXPERIMENT = "trainer.experiment_name="


def free_sweep_name(sweep: str, jobs: Iterable[Job], entries: Iterable[Entry]) -> str:
    """``sweep``, or ``sweep-2``, ... when the ledger has other runs by the names of ``jobs``."""
    runs = {entry.name: entry.run for entry in entries}
    new = [job for job in jobs if not job.resumes]

    def is_free(name: str) -> bool:
        return all(runs.get(f"{name}/{job.index}", str(job.run)) == str(job.run) for job in new)

    numbered = (f"{sweep}-{number}" for number in itertools.count(2))
    return next(filter(is_free, itertools.chain([sweep], numbered)))


def display_names(jobs: Sequence[Job], sweep: str) -> dict[int, str]:
    """The names in W&B by the jobs' index: ``sweep/3 lr=1e-4``, with what the job has for itself.

    A ``trainer.experiment_name`` of the job's own is the name; one that all jobs share stands for
    the sweep's.
    """
    varying = varying_overrides({job.index: job.overrides for job in jobs})
    names: dict[int, str] = {}
    for job in jobs:
        experiment = _experiment_name(job)
        own = varying[job.index]
        if experiment and any(plain(text).lstrip("+").startswith(EXPERIMENT) for text in own):
            names[job.index] = experiment
            continue
        texts = [short(text) for text in own] if len(jobs) > 1 else []
        name = " ".join([f"{experiment or sweep}/{job.index}", *texts])
        names[job.index] = name if len(name) <= LONGEST else name[: LONGEST - 3] + "..."
    return names


def _experiment_name(job: Job) -> str | None:
    """``trainer.experiment_name`` if the command line sets it."""
    for text in job.overrides:
        if plain(text).lstrip("+").startswith(EXPERIMENT):
            trainer: dict[str, Any] = job.config.get("trainer") or {}
            return str(trainer.get("experiment_name"))
    return None
