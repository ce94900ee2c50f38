"""What a plan says of itself on the terminal. Pure text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from jobs.ledger import Entry
from jobs.submit.plan import Batch, Plan

K = TypeVar("K", int, str)


def plan_text(plan: Plan, timeout_min: int, sweep: str) -> str:
    """One line per array, what is left out and why, and the GPU-hours at most."""
    lines = [f"sweep {sweep}: {len(plan.jobs)} job(s) in {len(plan.batches)} array(s)"]
    varying = varying_overrides({job.index: job.overrides for job in plan.jobs})
    common = [
        one
        for one in (plan.jobs[0].overrides if plan.jobs else ())
        if one not in varying[plan.jobs[0].index]
    ]
    lines += [f"  all with {' '.join(map(plain, common))}"] if common else []
    for batch in plan.batches:
        shape = batch.shape
        what = (
            f"{shape.gpus_per_node} GPU(s)"
            if shape.gpus_per_node
            else f"{shape.ranks_per_node} rank(s) on CPUs"
        )
        aside = (
            f", {shape.rollout_nodes} of them for vLLM servers only" if shape.rollout_nodes else ""
        )
        lines.append(
            f"  {batch.name}: {len(batch.jobs)} job(s), each {shape.nodes} node(s) x {what}{aside}"
        )
        lines += [
            f"    {job.index}: "
            f"{' '.join(map(plain, varying[job.index]))}{'  (goes on)' if job.again else ''}".rstrip()
            for job in batch.jobs
        ]
    lines += [f"  left out {job.index}: {why}" for job, why in plan.skipped]
    lines.append(
        f"  at most {plan.gpu_hours(timeout_min):.1f} GPU-hours per attempt "
        f"(timeout_min={timeout_min})"
    )
    return "\n".join(lines)


def varying_overrides(overrides: Mapping[K, Sequence[str]]) -> dict[K, list[str]]:
    """Of each job the overrides that not all jobs share; of a single job all of them."""
    shared = set.intersection(*map(set, overrides.values())) if len(overrides) > 1 else set()
    return {key: [one for one in mine if one not in shared] for key, mine in overrides.items()}


def plain(override: str) -> str:
    """An override as it was typed: Hydra's sweeper escapes ``:`` and ``=``."""
    return re.sub(r"\\([:=])", r"\1", override)


def scripts_text(scripts: Sequence[tuple[Batch, str]]) -> str:
    """The scripts, each under its array's name."""
    return "\n".join(f"===== {batch.name} =====\n{text}" for batch, text in scripts)


def submitted_text(entries: Sequence[Entry]) -> str:
    """Where to look next."""
    arrays = sorted({entry.job.split("_")[0] for entry in entries}, key=int)
    return f"submitted {len(entries)} job(s) as Slurm array(s) {', '.join(arrays)}; watch them with: python -m jobs status"
