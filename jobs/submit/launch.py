"""A sweep from resolved configs to a plan: compose every job, check all of them, and only then
touch anything.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import ledger, records
from jobs.attempt import causes
from jobs.ledger import LOCAL, Entry
from jobs.slurm import Slurm
from jobs.submit.plan import Earlier, Job
from jobs.submit.report import plain, varying_overrides
from jobs.submit.shape import shape_of
from jobs.submit.signature import signature_of
from jobs.view.state import ALIVE, RunState, Signs, state_of
from trainer.base import run_folder
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


def jobs_of(points: Sequence[Point], sweep_dir: Path) -> list[Job]:
    """Checked jobs with their run folders. Raises one UserError that lists what is wrong with every
    job.
    """
    from trainer.config import load

    jobs: list[Job] = []
    wrong: dict[str, list[Point]] = {}
    for point in points:
        try:
            given = {key: value for key, value in point.config.items() if key not in SITE_KEYS}
            checked = load(given)
            config = checked.model_dump(
                mode="json"
            )  # with every default and one spelling of every key
            shape = shape_of(config | {key: point.config.get(key) for key in SITE_KEYS})
            signature = signature_of(config)
        except UserError as error:
            wrong.setdefault(str(error), []).append(point)
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
    varying = varying_overrides({point.index: point.overrides for point in points})
    problems = [f"{_named(members, varying)}: {message}" for message, members in wrong.items()]
    taken: dict[Path, int] = {}
    for job in jobs:
        if job.run in taken:
            problems.append(
                f"jobs {taken[job.run]} and {job.index} share the run folder {job.run}; leave "
                "trainer.default_local_dir out of the overrides, and each job gets its own in "
                "hydra.sweep.dir."
            )
        taken.setdefault(job.run, job.index)
    if problems:
        raise UserError("\n".join(problems))
    return jobs


def _named(points: Sequence[Point], varying: Mapping[int, Sequence[str]]) -> str:
    """``job 3 (lr=1)``, ``job 3 (lr=1) and 11 more``: a mistake that all jobs share is told
    once.
    """
    first = points[0]
    words = " ".join(map(plain, varying[first.index])) or "no overrides"
    return f"job {first.index} ({words})" + (
        f" and {len(points) - 1} more" if len(points) > 1 else ""
    )


def _run_folder(point: Point, sweep_dir: Path, signature: str) -> Path:
    """The user's own ``trainer.default_local_dir`` when it was set for this job, else
    ``SWEEP/INDEX-SIGNATURE``.
    """
    if any(re.match(r"\+*trainer\.default_local_dir=", one) for one in point.overrides):
        return Path(os.path.abspath(point.config["trainer"]["default_local_dir"]))
    return Path(os.path.abspath(sweep_dir)) / f"{point.index:03d}-{signature[:8]}"


def states_of(entries: Sequence[Entry], slurm: Slurm | None) -> dict[str, RunState]:
    """State of every run of the ledger by run folder; asks Slurm once for all of them (not at all
    when None).

    Raises UserError when Slurm doesn't answer.
    """
    signs = {e.run: signs_of(e) for e in entries}
    unclear = [e for e in entries if e.job not in ("", LOCAL) and not _is_done(e, signs[e.run])]
    queue = (
        slurm.queue([e.job for e in unclear])
        if slurm and unclear
        else None
        if slurm is None
        else {}
    )
    gone = [
        e
        for e in unclear
        if queue is not None and (e.job not in queue or queue[e.job].state not in ALIVE)
    ]
    unknown = [e.job for e in gone if queue is not None and e.job not in queue]
    accounting = slurm.accounting(unknown) if slurm and unknown else {}
    signs |= {
        e.run: signs_of(e) for e in gone
    }  # again: a job may have ended between the first look and the queue's
    now = time.time()
    return {e.run: state_of(e, signs[e.run], queue, accounting, now=now) for e in entries}


def signs_of(entry: Entry) -> Signs:
    """What the run's folder says of this launch."""
    run = Path(entry.run)
    begun = run_folder.last_attempt(run)
    here = True
    started = run_folder.read_json(run_folder.log_folder(run, begun) / "begin.json")
    if entry.job == LOCAL:
        mine = started.get("nodes") == socket.gethostname()
        here = not mine or 0 != started.get("pid_start") == records.process_start(
            int(started.get("pid", 0))
        )
    return Signs(
        attempts=records.attempts(run),
        begun=begun,
        alive_at=records.newest_write(run, begun),
        here=here,
        started=begun > 0 and started.get("launch", entry.launch) == entry.launch,
        cancelled=run_folder.read_json(run / "cancel.json").get("launch") == entry.launch,
    )


def _is_done(entry: Entry, signs: Signs) -> bool:
    last = signs.attempts[-1] if signs.attempts else {}
    return last.get("cause") == causes.DONE and last.get("launch") == entry.launch


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
