"""The state of a run, put together from Slurm's queue, sacct and the run folder's own records.
Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.attempt import causes
from jobs.ledger import LOCAL, PLANNED, Entry
from jobs.slurm import JobInfo

STOPPED_BY = {
    causes.CANCELLED: "CANCELLED",
    causes.ERROR: "FAILED",
    causes.OUT_OF_MEMORY: "FAILED",
    causes.DONE: "COMPLETED",
}
"""What a last cause means for a run that isn't queued; every other cause means its budget is used
up: EXHAUSTED.
"""

ALIVE = (
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_HOLD",
    "STOPPED",
    "SIGNALING",
)

ENDING = "ENDING"
"""Slurm's queue has let go of the job, and neither accounting nor the run folder says yet how it
ended.
"""

UNKNOWN = "UNKNOWN"
"""Slurm was not asked, or isn't on this machine."""

GRACE_S = 60.0
"""How long after its last sign of life a job that nobody knows is ENDING; then it is LOST. slurmdbd
lags by seconds.
"""


STATES = (*ALIVE, ENDING, "COMPLETED", "FAILED", "CANCELLED", "EXHAUSTED", "LOST", UNKNOWN)
"""All that a run can be in."""


@dataclass(frozen=True, kw_only=True)
class Signs:
    """What a run's own folder says."""

    attempts: Sequence[Mapping[str, Any]]
    """Lines of ``attempts.jsonl``."""
    begun: int
    """Number of the newest attempt that has begun; 0 before the first."""
    alive_at: float = 0.0
    """When anything in the folder was last written to, time.time()."""
    started: bool = True
    """An attempt of this launch has begun."""
    cancelled: bool = False
    """This launch was ended with ``python -m jobs cancel``."""
    here: bool = True
    """Of a local run: its process still runs, or it runs on another machine."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One row of ``python -m jobs status``."""

    state: str
    """PENDING, RUNNING, ..., COMPLETED, FAILED, CANCELLED, EXHAUSTED (budget used up), ENDING, LOST
    (no record), UNKNOWN (Slurm wasn't asked).
    """
    attempt: int
    reason: str


def state_of(
    entry: Entry,
    signs: Signs,
    queue: Mapping[str, JobInfo] | None,
    accounting: Mapping[str, JobInfo] | None = None,
    *,
    now: float,
) -> RunState:
    """``queue`` None: Slurm was not asked; the records alone decide."""

    def found(state: str, reason: str) -> RunState:
        return RunState(state=state, attempt=signs.begun, reason="" if reason == "None" else reason)

    held = (queue or {}).get(entry.job)
    last = (
        signs.attempts[-1]
        if signs.attempts and signs.attempts[-1].get("launch") == entry.launch
        else None
    )
    if last is not None and last.get("attempt") != signs.begun:
        last = None  # an older attempt's: the newest one has begun and not ended
    if last is not None and last["cause"] == causes.DONE:
        return found("COMPLETED", "")
    if held is not None and held.state in ALIVE:
        return found(held.state, held.reason if held.state == "PENDING" else held.nodes)
    if last is not None and not last.get("requeue"):
        return found(STOPPED_BY.get(str(last["cause"]), "EXHAUSTED"), str(last["why"]))
    if entry.phase == PLANNED:
        return found("LOST", "planned, but sbatch never answered")
    if entry.job == LOCAL:
        return (
            found("RUNNING", "local")
            if signs.here
            else found("LOST", "its process ended without a record")
        )
    if queue is None:
        return found(UNKNOWN, "Slurm was not asked")
    known = held or (accounting or {}).get(entry.job)
    cause = (
        causes.cause_of_lost(known.state)
        if known is not None and known.state not in ALIVE
        else None
    )
    if signs.cancelled or cause == causes.CANCELLED:
        return found("CANCELLED", str(last["why"]) if last else "cancelled")
    if known is None and not signs.started and _array_is_known(entry.job, queue, accounting or {}):
        return found(
            "CANCELLED", "cancelled before it started"
        )  # such a task leaves no trace in Slurm
    if cause in STOPPED_BY and cause != causes.DONE and last is None:
        return found(
            STOPPED_BY[cause],
            f"Slurm says {known.state if known else ''}; the batch script left no record",
        )
    if now - max(signs.alive_at, entry.time) < GRACE_S:
        return found(ENDING, "left Slurm's queue; no record yet of how it ended")
    if last is not None:
        return found(
            "LOST",
            f"{last['why']}, but Slurm doesn't have it; python -m jobs resubmit {entry.name}",
        )
    why = "Slurm doesn't know this job" if known is None else f"Slurm says {known.state}"
    return found("LOST", why if known is None else f"{why}; the batch script left no record")


def _array_is_known(job: str, *sources: Mapping[str, JobInfo]) -> bool:
    array = job.split("_")[0] + "_"
    return any(one.startswith(array) for source in sources for one in source)
