"""The text of a sweep's plan on the terminal. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jobs.ledger import Entry
from jobs.submit.plan import JobBatch, SweepPlan
from jobs.submit.shape import Shape

K = TypeVar("K", int, str)


def plan_text(plan: SweepPlan, timeout_min: int, sweep: str) -> str:
    """One line per array and job, what is skipped and why, and the GPU-hours at most."""
    lines = [f"sweep {sweep}: {len(plan.jobs)} job(s) in {len(plan.batches)} array(s)"]
    varying = varying_overrides({job.index: job.overrides for job in plan.jobs})
    if plan.jobs:
        first = plan.jobs[0]
        common = [one for one in first.overrides if one not in varying[first.index]]
        if common:
            lines.append(f"  all with {' '.join(map(plain, common))}")
    for batch in plan.batches:
        lines.append(f"  {batch.name}: {len(batch.jobs)} job(s), each {_size_text(batch.shape)}")
        for job in batch.jobs:
            overrides = " ".join(map(plain, varying[job.index]))
            resumes = "  (goes on)" if job.resumes else ""
            lines.append(f"    {job.index}: {overrides}{resumes}".rstrip())
    lines += [f"  left out {job.index}: {why}" for job, why in plan.skipped]
    lines.append(
        f"  at most {plan.gpu_hours(timeout_min):.1f} GPU-hours per attempt "
        f"(timeout_min={timeout_min})"
    )
    return "\n".join(lines)


def _size_text(shape: Shape) -> str:
    """Nodes and GPUs of a job."""
    per_node = f"{shape.ranks_per_node} rank(s) on CPUs"
    if shape.gpus_per_node:
        per_node = f"{shape.gpus_per_node} GPU(s)"
    servers = ""
    if shape.rollout_nodes:
        servers = f", {shape.rollout_nodes} of them for vLLM servers only"
    return f"{shape.nodes} node(s) x {per_node}{servers}"


def varying_overrides(overrides: Mapping[K, Sequence[str]]) -> dict[K, list[str]]:
    """The overrides of each job that not all jobs share; all of them for a single job."""
    shared = set.intersection(*map(set, overrides.values())) if len(overrides) > 1 else set()
    return {key: [one for one in words if one not in shared] for key, words in overrides.items()}


def plain(override: str) -> str:
    """An override as it was typed: Hydra's sweeper escapes ``:`` and ``=``."""
    return re.sub(r"\\([:=])", r"\1", override)


def short(override: str) -> str:
    """``lr=1e-4`` of ``actor_rollout_ref.actor.optim.lr=1e-4``."""
    key, sign, value = plain(override).partition("=")
    return key.rpartition(".")[2] + sign + value


def scripts_text(scripts: Sequence[tuple[JobBatch, str]]) -> str:
    """The scripts, each under its array's name."""
    return "\n".join(f"===== {batch.name} =====\n{text}" for batch, text in scripts)


def submitted_text(entries: Sequence[Entry]) -> str:
    """Where to look next."""
    arrays = sorted({entry.job.split("_")[0] for entry in entries}, key=int)
    return (
        f"submitted {len(entries)} job(s) as Slurm array(s) {', '.join(arrays)}; watch them with: "
        "python -m jobs status"
    )


def interrupted_text(sweep: str, ledger: Path) -> str:
    """What Ctrl-C leaves behind, and how to look after it."""
    command = f"python -m jobs --ledger {shlex.quote(str(ledger))}"
    name = shlex.quote(sweep)
    return (
        "Interrupted: what was submitted goes on in Slurm.\n"
        f"  watch it:  {command} status {name}\n"
        f"  end it:    {command} cancel {name}"
    )
