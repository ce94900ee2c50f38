"""The state of a run, from Slurm's queue, sacct and the run folder's own records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.attempt import causes
from jobs.attempt.image import IMAGE_CHANGED
from jobs.ledger import LOCAL, PLANNED, Entry
from jobs.slurm import JobInfo

COMPLETED = "COMPLETED"
FAILED = ("FAILED", "CANCELLED", "EXHAUSTED", "LOST")
"""States of a run that has ended without finishing."""

STOPPED_BY = {
    causes.CANCELLED: "CANCELLED",
    causes.ERROR: "FAILED",
    causes.OUT_OF_MEMORY: "FAILED",
    IMAGE_CHANGED: "FAILED",
    causes.CRASH: "FAILED",
    causes.DONE: COMPLETED,
}
"""State of a run that isn't queued by the cause of its last attempt's end. Any other cause means
that its budget is used up: EXHAUSTED.
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
"""Slurm's states of a job that has not ended."""

ENDING = "ENDING"
"""The job left Slurm's queue, and neither accounting nor the run folder says yet how it ended."""

UNKNOWN = "UNKNOWN"
"""Slurm was not asked, or isn't on this machine."""

GRACE_S = 60.0
"""How long after its last write a job that Slurm doesn't know is ENDING; then it is LOST. slurmdbd
lags by seconds.
"""

FOLDER_GONE = "its run folder is not there any more"
"""Why a run is LOST whose folder was deleted, or moved from where the ledger has it."""

ENDED = (COMPLETED, *FAILED)
"""States of a run that will not go on by itself."""

STATES = (*ALIVE, ENDING, COMPLETED, *FAILED, UNKNOWN)
"""All states of a run."""


@dataclass(frozen=True, kw_only=True)
class FolderEvidence:
    """What a run's own folder says."""

    attempts: Sequence[Mapping[str, Any]]
    """Lines of ``attempts.jsonl``."""
    begun: int
    """Number of the newest attempt that has begun; 0 before the first."""
    last_write: float = 0.0
    """When anything in the folder was last written to, seconds since the epoch."""
    launch_begun: bool = True
    """Whether an attempt of this launch has begun."""
    cancelled: bool = False
    """Whether this launch was ended with ``python -m jobs cancel``."""
    refused: str = ""
    """Why the job of this launch did nothing: another launch owns the folder."""
    folder_exists: bool = True
    """Whether there is a run folder where the ledger says."""
    process_alive: bool = True
    """Whether the process of a local run still lives, or is on another machine."""
    finished: bool = False
    """Whether rank 0 of the newest attempt recorded that it has finished the run."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """State of a run, as ``python -m jobs status`` shows it."""

    state: str
    """One of ``STATES``."""
    attempt: int
    reason: str


def state_of(
    entry: Entry,
    evidence: FolderEvidence,
    queue: Mapping[str, JobInfo] | None,
    accounting: Mapping[str, JobInfo] | None = None,
    *,
    now: float,
) -> RunState:
    """The state of a run. ``queue`` None: Slurm was not asked; the records alone decide."""
    accounting = accounting or {}
    last = _last_attempt_of_launch(entry, evidence)
    job = (queue or {}).get(entry.job)
    verdict = _state_from_records(entry, evidence, job, last)
    if verdict is None and queue is None:
        verdict = (UNKNOWN, "Slurm was not asked")
    if verdict is None:
        known = job or accounting.get(entry.job)
        array_known = _array_is_known(entry.job, queue or {}, accounting)
        verdict = _state_from_slurm(entry, evidence, known, last, array_known, now)
    state, reason = verdict
    return RunState(state=state, attempt=evidence.begun, reason="" if reason == "None" else reason)


def _last_attempt_of_launch(entry: Entry, evidence: FolderEvidence) -> Mapping[str, Any] | None:
    """The record of the newest attempt, once it has ended; None while it runs."""
    if not evidence.attempts:
        return None
    last = evidence.attempts[-1]
    if last.get("launch") != entry.launch or last.get("attempt") != evidence.begun:
        return None
    return last


def _state_from_records(
    entry: Entry,
    evidence: FolderEvidence,
    job: JobInfo | None,
    last: Mapping[str, Any] | None,
) -> tuple[str, str] | None:
    """State and reason as far as the run folder, the ledger and Slurm's queue decide."""
    if last is not None and last["cause"] == causes.DONE:
        return COMPLETED, ""
    if job is not None and job.state in ALIVE:
        return job.state, job.reason if job.state == "PENDING" else job.nodes
    if not evidence.folder_exists:
        return "LOST", FOLDER_GONE
    if evidence.refused:
        return "FAILED", evidence.refused
    if last is not None and not last.get("requeue"):
        return STOPPED_BY.get(str(last["cause"]), "EXHAUSTED"), str(last["why"])
    if last is None and evidence.finished and evidence.launch_begun:
        return COMPLETED, "the batch script left no record"
    if entry.job == LOCAL:
        if evidence.process_alive and entry.phase == PLANNED:
            return "PENDING", "local: waits for the jobs before it"
        if evidence.process_alive:
            return "RUNNING", "local"
        return "LOST", "its process ended without a record"
    if entry.phase == PLANNED:
        return "LOST", "planned, but sbatch never answered"
    return None


def _state_from_slurm(
    entry: Entry,
    evidence: FolderEvidence,
    known: JobInfo | None,
    last: Mapping[str, Any] | None,
    array_known: bool,
    now: float,
) -> tuple[str, str]:
    """State and reason of a job that is not in the queue any more."""
    cause = None
    if known is not None and known.state not in ALIVE:
        cause = causes.cause_by_accounting(known.state)
    if evidence.cancelled or cause == causes.CANCELLED:
        return "CANCELLED", str(last["why"]) if last else "cancelled"
    if known is None and not evidence.launch_begun and array_known:
        # Such a task of an array leaves no trace in Slurm.
        return "CANCELLED", "cancelled before it started"
    no_record = f"Slurm says {known.state if known else ''}; the batch script left no record"
    if cause in STOPPED_BY and last is None:
        return STOPPED_BY[cause], no_record
    if now - max(evidence.last_write, entry.time) < GRACE_S:
        return ENDING, "left Slurm's queue; no record yet of how it ended"
    if last is not None:
        return "LOST", (
            f"{last['why']}, but Slurm doesn't have it; python -m jobs resubmit {entry.name}"
        )
    if known is None:
        return "LOST", "Slurm doesn't know this job"
    return "LOST", no_record


def _array_is_known(job: str, *sources: Mapping[str, JobInfo]) -> bool:
    array = job.split("_")[0] + "_"
    return any(other.startswith(array) for source in sources for other in source)
