"""Why an attempt ended. Pure functions over what is known when its ranks are gone.

What the ranks recorded comes first (``trainer.base.rank_records``), then Slurm's records, then the
clock. An exit code alone never tells a cause: srun exits 0 after it lost a node, and with 1 when a
rank lost its peer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer.base import rank_records
from trainer.base.errors import EXIT_BAD_NODE, EXIT_REQUEUE
from trainer.base.rank_records import RankEnd, RankRecord

DONE = "done"
PREEMPTED = "preempted"
TIMEOUT = "timeout"
REQUEUED = "requeued"
SIGNALLED = "signalled"
NODE_FAILURE = "node_failure"
BAD_NODE = "bad_node"
CRASH = "crash"
OUT_OF_MEMORY = "out_of_memory"
CANCELLED = "cancelled"
ERROR = "error"

RUNNING = ("RUNNING", "SIGNALING", "STOPPED")
"""States of a job that Slurm is not ending itself. SIGNALING: its USR2 is still on the way to some
process, while the ranks have saved and left already.
"""

SIGNAL_EARLY_S = 60
"""Slurm may send ``--signal`` up to 60 s before the time that was asked for (sbatch(1))."""

KILLED_EARLY = (128 + 12, 128 + 15)
"""Exit codes of a process that USR2 or TERM killed before it had a handler: only its start was
lost.
"""
KILLED = 128 + 9
"""Exit code of a killed process: by the kernel when memory was short, by srun, by hand."""
FATAL_SIGNALS = {128 + 4: "SIGILL", 128 + 6: "SIGABRT", 128 + 7: "SIGBUS", 128 + 8: "SIGFPE"} | {
    128 + 11: "SIGSEGV"
}
"""Exit codes of processes that broke down themselves: CUDA and NCCL abort, a bad access to memory.
"""

ACCOUNTING = {
    "PREEMPTED": PREEMPTED,
    "TIMEOUT": TIMEOUT,
    "DEADLINE": TIMEOUT,
    "NODE_FAIL": NODE_FAILURE,
    "BOOT_FAIL": NODE_FAILURE,
    "OUT_OF_MEMORY": OUT_OF_MEMORY,
    "CANCELLED": CANCELLED,
    "FAILED": CRASH,
    "REQUEUED": REQUEUED,
}
"""Causes by sacct's state. A job that Slurm itself queued again has the reason as its state
(PREEMPTED, NODE_FAIL); REQUEUED is an operator's ``scontrol requeue``, whose KillWait was too short
to save. COMPLETED is missing: that the batch script ended with 0 says nothing about the run.
"""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What is known when the ranks of an attempt are gone."""

    exit_code: int | None
    """Of srun: the highest of all ranks. None: the batch script died too."""
    records: Mapping[int, RankRecord] = field(default_factory=dict)
    """What each rank left, by its number."""
    tasks: int = 1
    """Processes that the attempt was to have: ranks, and those of nodes that hold servers."""
    nodes: Sequence[str] = ()
    """Names of the attempt's nodes, in Slurm's order; each has as many processes as the others."""
    dead_nodes: Sequence[str] = ()
    """Nodes on which no process can be started any more, or which Slurm calls down."""
    bad_nodes: Sequence[str] = ()
    """Nodes that the node check found unfit."""
    memory_kill: bool = False
    """Whether the kernel killed a process of this attempt because memory was short."""
    slurm: Mapping[str, str] | None = None
    """Fields of ``scontrol show job`` (JobState, PreemptTime, Restarts, ...)."""
    accounting: str | None = None
    """sacct's state of an attempt whose batch script died too; None: no accounting, or no row."""
    started: float = 0.0
    """When this attempt began, seconds since the epoch."""
    restarts: int = 0
    """SLURM_RESTART_COUNT of this attempt."""
    elapsed_s: float = 0.0
    limit_s: float = float("inf")
    signal_delay_s: float = 0.0

    @property
    def ends(self) -> dict[int, RankEnd]:
        """The end records by rank."""
        return {rank: record.end for rank, record in self.records.items() if record.end is not None}

    def first(self, kind: str) -> RankEnd | None:
        """The earliest end record of a kind."""
        ends = [end for end in self.ends.values() if end.kind == kind]
        return min(ends, key=lambda end: end.time, default=None)

    @property
    def silent(self) -> list[int]:
        """Ranks that began and left no end record."""
        return [rank for rank, record in self.records.items() if record.end is None]

    @property
    def never_began(self) -> list[int]:
        """Ranks that left no record at all."""
        return [rank for rank in range(self.tasks) if rank not in self.records]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why an attempt ended."""

    name: str
    nodes: tuple[str, ...] = ()
    """Nodes that are to blame, which the next attempt avoids."""
    detail: str = ""
    """What happened, in one line."""


def cause_of(end: Ending) -> Cause:
    """The cause of an ending.

    A finished rank 0 and wrong input are final whatever else happened. Then Slurm's records decide
    (a preemption time, a job that it has queued again), since the same USR2 announces a preemption,
    the time limit and an operator's request; then the ranks' own records.
    """
    rank_0 = end.ends.get(0)
    if rank_0 is not None and rank_0.kind == rank_records.FINISHED:
        return Cause(name=DONE)
    wrong_input = end.first(rank_records.USER_ERROR)
    if wrong_input is not None:
        return Cause(name=ERROR, detail=wrong_input.message)
    if end.exit_code == EXIT_BAD_NODE and end.never_began:
        return Cause(name=BAD_NODE, nodes=tuple(end.bad_nodes) or _suspects(end))
    if _memory_kill(end):
        return Cause(name=OUT_OF_MEMORY, detail="the kernel killed a process for its memory")
    return _cause_by_slurm(end) or _cause_by_stop(end) or _cause_by_failure(end)


def cause_by_accounting(state: str) -> str | None:
    """The cause that sacct's state names; None when it says nothing about the run's end.

    ``state`` may carry a remark: ``CANCELLED by 0``, ``CANCELLED+``.
    """
    words = state.split(" ")
    return ACCOUNTING.get(words[0].rstrip("+"))


def parse_show_job(text: str) -> dict[str, str]:
    """The fields of ``scontrol show job -o``; values with blanks are cut at the blank."""
    return dict(re.findall(r"(?:^|\s)([A-Za-z/:]+)=(\S*)", text))


def parse_nodes(text: str, nodes: Sequence[str]) -> list[str]:
    """The dead ones of ``nodes``, from lines ``NODE STATE``: Slurm's state of a node, or ``silent``
    for one on which no process could be started.

    Where none could be started at all, the job is to blame and not its nodes.
    """
    rows = [line.split() for line in text.splitlines()]
    states = [(row[0], row[1].lower()) for row in rows if len(row) == 2 and row[0] in nodes]
    down = {node for node, state in states if state.startswith(("down", "fail")) or "*" in state}
    silent = {node for node, state in states if state == "silent"}
    if silent >= set(nodes):
        silent = set()
    return sorted(down | silent)


def _memory_kill(end: Ending) -> bool:
    slurm = end.slurm or {}
    if "OUT_OF_MEMORY" in (slurm.get("JobState"), end.accounting):
        return True
    if slurm.get("Reason") == "OutOfMemory":
        return True
    return end.memory_kill and end.exit_code in (KILLED, None) and bool(end.silent)


def _cause_by_slurm(end: Ending) -> Cause | None:
    """The cause as far as Slurm took the job away itself."""
    if end.accounting is not None:
        name = cause_by_accounting(end.accounting)
        if name is None or name == CRASH:
            return None  # the ranks' records say more
        nodes = end.nodes if name == NODE_FAILURE and len(end.nodes) == 1 else ()
        return Cause(name=name, nodes=tuple(nodes), detail=f"sacct says {end.accounting}")
    slurm = end.slurm or {}
    if _preempted_now(slurm, end.started):
        return Cause(name=PREEMPTED)
    if slurm.get("JobState") == "NODE_FAIL":
        return _node_failure(end)
    if _number(slurm.get("Restarts")) > end.restarts:
        # Queued again by an operator, or by Slurm itself after it lost a node.
        return _node_failure(end) if _peer_died(end) else Cause(name=REQUEUED)
    if slurm.get("JobState", "RUNNING") in RUNNING:
        return None
    if end.dead_nodes:
        return _node_failure(end)
    return Cause(name=TIMEOUT if _is_late(end, ended_by_slurm=True) else CANCELLED)


def _cause_by_stop(end: Ending) -> Cause | None:
    """The cause of an attempt that was asked to stop and did; None when it was not."""
    stop = end.first(rank_records.STOPPED)
    started = len(end.never_began) < end.tasks
    killed_early = end.exit_code in KILLED_EARLY and bool(end.never_began) and not end.ends
    # The record of a stop may be missing where the disk is full; the code is the trainer's own.
    saved = end.exit_code == EXIT_REQUEUE and end.first(rank_records.CRASH) is None
    if stop is None and not saved and not killed_early:
        return None
    request = stop.stop if stop is not None else None
    if request == "TERM" and _failed_unasked(end):
        return None  # srun's TERM to the ranks that are left
    if request == "TIME" or _is_late(end, ended_by_slurm=False):
        return Cause(name=TIMEOUT)
    if request == "INT":
        return Cause(name=CANCELLED)
    return Cause(name=SIGNALLED, detail="" if started else "before the ranks had begun")


def _cause_by_failure(end: Ending) -> Cause:
    """The cause of an attempt that nobody stopped and that did not finish."""
    if end.dead_nodes:
        return _node_failure(end)
    crash = end.first(rank_records.CRASH)
    if crash is not None:
        return Cause(name=CRASH, detail=f"{crash.host}: {crash.message}")
    if end.exit_code in FATAL_SIGNALS and not end.never_began:
        signal = FATAL_SIGNALS[end.exit_code]
        return Cause(name=CRASH, detail=f"a process was killed by {signal}")
    lost_peer = end.first(rank_records.LOST_PEER) is not None
    if end.accounting is not None and not lost_peer:
        return Cause(name=CRASH, detail=f"sacct says {end.accounting}")
    if _died_beside_the_batch_script(end) or _killed_alone(end):
        return Cause(name=CRASH, detail=_silent_detail(end))
    if end.never_began or lost_peer or end.exit_code is None:
        return _node_failure(end)
    return Cause(name=CRASH, detail=_silent_detail(end))


def _silent_detail(end: Ending) -> str:
    """What is known of ranks that left no record of their end."""
    ranks = ", ".join(map(str, end.silent[:8]))
    how = "left no record of its end"
    if end.exit_code == KILLED:
        how = "was killed by SIGKILL"
    return f"rank {ranks} {how}; exit code {end.exit_code}"


def _node_failure(end: Ending) -> Cause:
    """A lost node, with its name where it is known."""
    lost = end.first(rank_records.LOST_PEER)
    detail = ""
    if end.never_began:
        detail = f"{len(end.never_began)} of {end.tasks} processes never began"
    elif lost is not None:
        detail = f"{lost.host}: {lost.message}"
    return Cause(name=NODE_FAILURE, nodes=_suspects(end), detail=detail)


def _suspects(end: Ending) -> tuple[str, ...]:
    """The nodes that dead ones, ranks that never began, or silent ranks give away; none when that
    would be all of several.
    """
    suspects = set(end.dead_nodes) or set(_nodes_of(end, end.never_began))
    if not suspects and end.exit_code is not None:
        # The first node is that of the batch script, which lives.
        suspects = set(_nodes_of(end, end.silent)) - set(end.nodes[:1])
    if len(end.nodes) > 1 and suspects >= set(end.nodes):
        return ()
    return tuple(sorted(suspects))


def _died_beside_the_batch_script(end: Ending) -> bool:
    """Whether the silent ranks are all on the first node, which lives with the batch script."""
    if end.exit_code is None or end.never_began or not end.silent:
        return False
    return _nodes_of(end, end.silent) == list(end.nodes[:1])


def _failed_unasked(end: Ending) -> bool:
    """Whether a rank failed that was not asked to stop: srun then sends TERM to the others."""
    failures = [
        one
        for one in end.ends.values()
        if one.kind in (rank_records.CRASH, rank_records.LOST_PEER) and one.stop is None
    ]
    broke_down = end.exit_code in FATAL_SIGNALS or end.exit_code == KILLED
    return bool(failures) or (broke_down and bool(end.silent))


def _killed_alone(end: Ending) -> bool:
    """Whether a rank was killed on a node that answers: srun has its exit code, and no node is
    dead.
    """
    return end.exit_code == KILLED and bool(end.silent) and not end.never_began


def _nodes_of(end: Ending, ranks: Sequence[int]) -> list[str]:
    """The nodes of ``ranks``; srun fills one node after the other."""
    per_node = max(1, end.tasks // max(1, len(end.nodes)))
    names = []
    for rank in ranks:
        record = end.records.get(rank)
        if record is not None and record.host:
            names.append(record.host)
        elif rank // per_node < len(end.nodes):
            names.append(end.nodes[rank // per_node])
    return sorted(set(names))


def _peer_died(end: Ending) -> bool:
    """Whether a node was lost before anybody was asked to stop."""
    if end.dead_nodes:
        return True
    lost = end.first(rank_records.LOST_PEER)
    crashed = end.first(rank_records.CRASH) is not None
    own_fault = crashed or _died_beside_the_batch_script(end) or _killed_alone(end)
    return lost is not None and lost.stop is None and not own_fault


def _is_late(end: Ending, *, ended_by_slurm: bool) -> bool:
    """Whether the time limit is there, or so near that Slurm has warned of it."""
    warning_s = end.limit_s - end.signal_delay_s - SIGNAL_EARLY_S
    return end.elapsed_s >= (end.limit_s if ended_by_slurm else warning_s)


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
