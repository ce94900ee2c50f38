"""Collect what is known about an attempt's end: the records in its log folder, Slurm's words, the
clock, the kernel's counters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.attempt.causes import Ending, parse_nodes, parse_show_job
from jobs.slurm import seconds
from trainer.base import memory
from trainer.base.rank_info import hosts_of
from trainer.base.rank_records import read_records
from trainer.base.run_folder import log_folder, log_tail

OOM_MESSAGE = re.compile(r"slurmstepd: error: Detected \d+ oom[-_ ]kill")
"""What Slurm writes into the log of a step of which the kernel killed a process."""
NOT_ENDED = ("RUNNING", "PENDING", "COMPLETING")
"""States of sacct's rows of attempts that have not ended."""


@dataclass(frozen=True, kw_only=True)
class ShellEvidence:
    """What the batch script saw."""

    exit_code: int
    """Of srun."""
    scontrol: str = ""
    """Output of ``scontrol show job -o``."""
    nodes: str = ""
    """Lines ``NODE STATE`` of the job's nodes, as ``causes.parse_nodes`` reads them."""
    bad_nodes: str = ""
    """Nodes that the node check found unfit, with commas."""


def ending_seen(
    run: Path,
    started: Mapping[str, Any],
    plan: Mapping[str, Any],
    shell: ShellEvidence,
    now: float,
) -> Ending:
    """The end of the attempt that ``started`` (its ``begin.json``), seen by its batch script."""
    start = float(started.get("start", now))
    folder = log_folder(run, int(started.get("attempt", 0)))
    slurm = parse_show_job(shell.scontrol)
    # scontrol may have changed the limit since the job was submitted.
    limit_s = seconds(slurm.get("TimeLimit", "")) or plan.get("limit_s") or "inf"
    hosts = hosts_of(str(started.get("nodes", "")))
    kills = memory.oom_kills() > int(started.get("oom_kills", memory.oom_kills()))
    return Ending(
        exit_code=shell.exit_code,
        records=read_records(folder),
        tasks=_tasks(plan),
        nodes=hosts,
        dead_nodes=parse_nodes(shell.nodes, hosts),
        bad_nodes=[node for node in shell.bad_nodes.split(",") if node],
        memory_kill=kills or _says_memory_kill(folder),
        slurm=slurm,
        started=start,
        restarts=int(started.get("restarts", 0)),
        elapsed_s=now - start,
        limit_s=float(limit_s),
        signal_delay_s=float(plan.get("signal_delay_s", 0)),
    )


def ending_lost(
    run: Path, started: Mapping[str, Any], plan: Mapping[str, Any], state: str | None, ended: float
) -> Ending:
    """The end of an attempt whose batch script died with it; ``state`` is sacct's."""
    start = float(started.get("start") or ended)
    folder = log_folder(run, int(started.get("attempt", 0)))
    return Ending(
        exit_code=None,
        records=read_records(folder),
        tasks=_tasks(plan),
        nodes=hosts_of(str(started.get("nodes") or "")),
        memory_kill=_says_memory_kill(folder),
        accounting=state,
        started=start,
        elapsed_s=ended - start,
        limit_s=float(plan.get("limit_s") or "inf"),
        signal_delay_s=float(plan.get("signal_delay_s", 0)),
    )


def last_ended_row(sacct: str, began: float) -> tuple[str | None, float | None]:
    """State and end of the newest ended row (``State|ExitCode|NodeList|End``) since ``began``; None
    when there is none.
    """
    newest: tuple[str | None, float | None] = (None, None)
    for line in sacct.splitlines():
        state, *rest = line.split("|")
        if len(rest) < 3 or state.split(" ")[0] in NOT_ENDED:
            continue
        ended = float(rest[2]) if rest[2].isdigit() else None
        if ended is None or ended >= began - 1:  # Slurm's clock has whole seconds
            newest = (state, ended)
    return newest


def _tasks(plan: Mapping[str, Any]) -> int:
    return int(plan.get("tasks") or plan.get("ranks") or 1)


def _says_memory_kill(folder: Path) -> bool:
    return any(OOM_MESSAGE.search(log_tail(log)) for log in folder.glob("rank_*.log"))
