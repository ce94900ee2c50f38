"""A sweep from resolved configs to a plan: compose every job, check all of them, and only then touch anything."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import ledger, records
from jobs.ledger import Entry
from jobs.plan import Earlier, Job
from jobs.shape import shape_of
from jobs.signature import signature_of
from jobs.slurm import Slurm
from jobs.state import RunState, state_of
from trainer.errors import UserError

SITE_KEYS = ("cluster", "container")
"""Groups of the config that only the login node reads; a rank's frozen config doesn't hold them."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of a sweep as Hydra composed it."""

    index: int
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    """Resolved, with the groups ``cluster`` and ``container``."""


def jobs_of(points: Sequence[Point], sweep_dir: Path) -> list[Job]:
    """Checked jobs with their run folders. Raises one UserError that lists what is wrong with every job."""
    from trainer.config import load

    jobs: list[Job] = []
    problems: list[str] = []
    for point in points:
        try:
            given = {key: value for key, value in point.config.items() if key not in SITE_KEYS}
            checked = load(given)
            config = checked.model_dump(mode="json")  # with every default and one spelling of every key
            shape = shape_of(config | {key: point.config.get(key) for key in SITE_KEYS})
            signature = signature_of(config)
        except UserError as error:
            problems.append(f"job {point.index} ({' '.join(point.overrides) or 'no overrides'}): {error}")
            continue
        run = _run_folder(point, sweep_dir, signature)
        jobs.append(
            Job(
                index=point.index,
                overrides=point.overrides,
                config=config,
                checked=checked,
                run=run,
                shape=shape,
                signature=signature,
            )
        )
    taken: dict[Path, int] = {}
    for job in jobs:
        if job.run in taken:
            problems.append(
                f"jobs {taken[job.run]} and {job.index} share the run folder {job.run}; leave "
                "trainer.default_local_dir out of the overrides, and each job gets its own in hydra.sweep.dir."
            )
        taken.setdefault(job.run, job.index)
    if problems:
        raise UserError("\n".join(problems))
    return jobs


def _run_folder(point: Point, sweep_dir: Path, signature: str) -> Path:
    """The user's own ``trainer.default_local_dir`` when it was set for this job, else ``SWEEP/INDEX-SIGNATURE``."""
    if any(re.match(r"\+*trainer\.default_local_dir=", one) for one in point.overrides):
        return Path(os.path.abspath(point.config["trainer"]["default_local_dir"]))
    return Path(os.path.abspath(sweep_dir)) / f"{point.index:03d}-{signature[:8]}"


def states_of(entries: Sequence[Entry], slurm: Slurm | None) -> dict[str, RunState]:
    """State of every run of the ledger by run folder; asks Slurm once for all of them (not at all when None)."""
    attempts = {e.run: records.attempts(Path(e.run)) for e in entries}
    unclear = [e for e in entries if e.job != "local" and not _is_closed(e, attempts[e.run])]
    queue = slurm.queue([e.job for e in unclear]) if slurm and unclear else None
    missing = [e.job for e in unclear if queue is not None and e.job not in queue]
    accounting = slurm.accounting(missing) if slurm and missing else {}
    return {
        e.run: state_of(e, attempts[e.run], records.last_attempt(Path(e.run)), queue, accounting) for e in entries
    }  # fmt: skip


def _is_closed(entry: Entry, attempts: Sequence[Mapping[str, Any]]) -> bool:
    return bool(attempts) and attempts[-1].get("cause") == "done" and attempts[-1].get("launch") == entry.launch


def earlier_runs(path: Path, slurm: Slurm | None, signatures: set[str]) -> dict[str, Earlier]:
    """Earlier launches of these signatures; a live or completed one wins over a failed one."""
    entries = [e for e in ledger.read(path) if e.signature in signatures]
    states = states_of(entries, slurm)
    found: dict[str, Earlier] = {}
    rank = {"COMPLETED": 2, "FAILED": 0, "CANCELLED": 0, "EXHAUSTED": 0, "LOST": 0}
    for entry in entries:
        state = states[entry.run].state
        before = found.get(entry.signature)
        if before is None or rank.get(state, 1) >= rank.get(before.state, 1):
            found[entry.signature] = Earlier(run=Path(entry.run), state=state, name=entry.name)
    return found
