"""Why an attempt ended, and whether the job is queued again. Pure functions over what the batch
script saw.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import EXIT_BAD_NODE, EXIT_OK, EXIT_REQUEUE

DONE = "done"
PREEMPTED = "preempted"
TIMEOUT = "timeout"
REQUEUED = "requeued"
SIGNALLED = "signalled"
NODE_FAILURE = "node_failure"
BAD_NODE = "bad_node"
OUT_OF_MEMORY = "out_of_memory"
CANCELLED = "cancelled"
ERROR = "error"

BUDGET_OF = {
    PREEMPTED: "preempted",
    REQUEUED: "preempted",
    SIGNALLED: "preempted",
    TIMEOUT: "timeout",
    NODE_FAILURE: "node_failure",
    BAD_NODE: "bad_node",
}
"""The budget each cause draws on. A cause that is missing here is never queued again."""

RUNNING = ("RUNNING", "SIGNALING", "STOPPED")
"""States of a job that Slurm is not ending itself. SIGNALING: its USR2 is still on the way to some
process, while the ranks have saved and left already.
"""

SIGNAL_EARLY_S = 60
"""Slurm may send ``--signal`` up to 60 s before the time that was asked for (sbatch(1))."""

KILLED_BY = {128 + 12: "USR2", 128 + 15: "TERM"}
"""Exit codes of a rank that a signal killed before it had a handler: only its start was
lost.
"""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known when the ranks of an attempt are gone."""

    exit_code: int
    """Of srun: the highest of all ranks."""
    stop_request: str | None = None
    """Why the trainer stopped, from a rank's end record: USR2, TERM, INT, or TIME when the
    time limit was near.
    """
    slurm: Mapping[str, str] | None = None
    """Fields of ``scontrol show job`` (JobState, PreemptTime, Restarts, ...)."""
    started: float = 0.0
    """When this attempt began, seconds since the epoch."""
    restarts: int = 0
    """SLURM_RESTART_COUNT of this attempt."""
    elapsed_s: float = 0.0
    limit_s: float = float("inf")
    signal_delay_s: float = 0.0


def cause_of(end: Ending) -> str:
    """The cause of an ending.

    Slurm's records come first (a preemption time, a job that it has queued again), then the clock,
    then exit codes: the same USR2 announces a preemption, the time limit and an operator's request.
    """
    slurm = end.slurm or {}
    if end.exit_code == EXIT_OK:
        return DONE
    if end.exit_code == EXIT_BAD_NODE:
        return BAD_NODE
    stopping = (
        end.exit_code == EXIT_REQUEUE or end.exit_code in KILLED_BY or end.stop_request is not None
    )
    ended_by_slurm = slurm.get("JobState", "RUNNING") not in RUNNING
    if slurm.get("JobState") == "OUT_OF_MEMORY" or (slurm.get("Reason") == "OutOfMemory"):
        return OUT_OF_MEMORY
    if not stopping and not ended_by_slurm:
        return ERROR
    if _preempted_now(slurm, end.started):
        return PREEMPTED
    if _number(slurm.get("Restarts")) > end.restarts:
        return REQUEUED
    if slurm.get("JobState") == "NODE_FAIL":
        return NODE_FAILURE
    signal_s = end.limit_s - end.signal_delay_s - SIGNAL_EARLY_S
    after_limit = end.elapsed_s >= end.limit_s
    after_warning = not ended_by_slurm and end.elapsed_s >= signal_s
    if end.stop_request == "TIME" or after_limit or after_warning:
        return TIMEOUT
    return CANCELLED if ended_by_slurm or end.stop_request == "INT" else SIGNALLED


def cause_of_lost(state: str, exit_code: str = "0:0") -> str:
    """The cause of an attempt that left no record, from sacct's state: its batch script died with
    it.

    ``state`` may carry a remark (``CANCELLED by 0``). A job that Slurm itself queued again has the
    reason as its state (PREEMPTED, NODE_FAIL); REQUEUED is an operator's ``scontrol requeue``,
    whose KillWait was too short to save.
    """
    name = state.split(" ")[0].rstrip("+")
    known = {
        "PREEMPTED": PREEMPTED,
        "TIMEOUT": TIMEOUT,
        "DEADLINE": TIMEOUT,
        "NODE_FAIL": NODE_FAILURE,
        "BOOT_FAIL": NODE_FAILURE,
        "OUT_OF_MEMORY": OUT_OF_MEMORY,
        "CANCELLED": CANCELLED,
        "COMPLETED": DONE,
        "FAILED": ERROR,
        "REQUEUED": REQUEUED,
    }
    return known.get(name, NODE_FAILURE)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the batch script does next."""

    requeue: bool
    cause: str
    why: str
    exclude: tuple[str, ...] = ()
    """Nodes the next attempt must avoid."""

    def line(self) -> str:
        """One line for the shell: ``requeue|stop CAUSE NODES|-``; words of letters, digits, '-',
        '_', ',' only.
        """
        nodes = ",".join(n for n in self.exclude if re.fullmatch(r"[\w.-]+", n)) or "-"
        return f"{'requeue' if self.requeue else 'stop'} {self.cause} {nodes}"


def decide(
    cause: str,
    earlier: Sequence[str],
    budgets: Mapping[str, int | None],
    bad_nodes: Sequence[str] = (),
) -> Decision:
    """Queue again, or stop. ``earlier`` holds the causes of the attempts before; a budget of None
    has no limit.
    """
    if cause in (DONE, CANCELLED):
        return Decision(
            requeue=False, cause=cause, why="finished" if cause == DONE else "cancelled"
        )
    budget = BUDGET_OF.get(cause)
    if budget is None:
        return Decision(
            requeue=False, cause=cause, why=f"{cause}: running it again would end the same way"
        )
    limit = budgets.get(budget)
    used = sum(1 for one in earlier if BUDGET_OF.get(one) == budget)
    if limit is not None and used >= limit:
        return Decision(
            requeue=False,
            cause=cause,
            why=f"{cause}: the budget of {limit} for '{budget}' is used up",
        )
    of = "" if limit is None else f" of {limit}"
    return Decision(
        requeue=True,
        cause=cause,
        why=f"{cause}: queued again ({used + 1}{of})",
        exclude=tuple(sorted(set(bad_nodes))),
    )


def parse_show_job(text: str) -> dict[str, str]:
    """The fields of ``scontrol show job -o``; values with blanks are cut at the blank."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", text))


def budgets_from(options: Any) -> dict[str, int | None]:
    """Budgets by cause from launcher options; -1 means no limit."""
    limit = options.max_preemptions
    return {
        "preempted": None if limit < 0 else limit,
        "timeout": options.max_num_timeout,
        "node_failure": options.max_node_failures,
        "bad_node": options.max_bad_nodes,
    }


def _preempted_now(slurm: Mapping[str, str], started: float) -> bool:
    """Whether PreemptTime (seconds since the epoch) belongs to this attempt: Slurm keeps that of an
    earlier one.

    StartTime can't tell: a job whose save took longer than its grace time is queued again by then,
    with a later StartTime.
    """
    preempted = _number(slurm.get("PreemptTime"))
    return preempted > 0 and preempted >= started - 1  # Slurm's clock has whole seconds


def _number(text: str | None) -> int:
    return int(text) if text and text.isdigit() else 0
