"""The state of a run, put together from Slurm's queue, sacct and the run folder's own records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs import causes
from jobs.ledger import PLANNED, Entry
from jobs.slurm import JobInfo

STOPPED_BY = {
    causes.CANCELLED: "CANCELLED", causes.ERROR: "FAILED", causes.OUT_OF_MEMORY: "FAILED", causes.DONE: "COMPLETED",
}  # fmt: skip
"""What a last cause means for a run that isn't queued; every other cause means its budget is used up: EXHAUSTED."""

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


@dataclass(frozen=True, kw_only=True)
class RunState:
    """One row of ``python -m jobs status``."""

    state: str
    """PENDING, RUNNING, ..., COMPLETED, FAILED, CANCELLED, EXHAUSTED (budget used up), LOST (no record)."""
    attempt: int
    reason: str


def state_of(
    entry: Entry, attempts: Sequence[Mapping[str, Any]], begun: int, queue: Mapping[str, JobInfo] | None,
    accounting: Mapping[str, JobInfo] | None = None,
) -> RunState:  # fmt: skip
    """``queue`` None: Slurm was not asked; the records alone decide. ``begun``: number of the newest attempt."""
    held = (queue or {}).get(entry.job)
    last = attempts[-1] if attempts and attempts[-1].get("launch") == entry.launch else None
    closed = last is not None and last.get("attempt") == begun
    if last is not None and closed and last["cause"] == causes.DONE:
        return RunState(state="COMPLETED", attempt=begun, reason="")
    if held is not None and held.state in ALIVE:
        reason = held.reason if held.state == "PENDING" else held.nodes
        return RunState(state=held.state, attempt=begun, reason="" if reason == "None" else reason)
    if last is not None and closed:
        return RunState(state=STOPPED_BY.get(str(last["cause"]), "EXHAUSTED"), attempt=begun, reason=str(last["why"]))
    if entry.phase == PLANNED:
        return RunState(state="LOST", attempt=begun, reason="planned, but sbatch never answered")
    if entry.job == "local" and queue is None:
        return RunState(state="RUNNING", attempt=begun, reason="local")
    known = held or (accounting or {}).get(entry.job)
    if known is None:
        return RunState(
            state="UNKNOWN" if queue is None else "LOST", attempt=begun, reason="Slurm doesn't know this job"
        )
    cause = causes.cause_of_lost(known.state)
    return RunState(
        state={"done": "LOST"}.get(cause, STOPPED_BY.get(cause, "LOST")), attempt=begun,
        reason=f"Slurm says {known.state}; the batch script left no record",
    )  # fmt: skip
