"""Metrics as text for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HEADLINE = ("critic/score/mean", "val/reward", "train/nll", "actor/loss")
"""The first of these that a step has is its headline: a reward before a loss."""
MEMORY = ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb")
_RECORD_ONLY = re.compile(
    r"(training|cost|speed|global_seqlen|prompt_length|critic/advantages|batch/micro_batch_tokens)/.*|.*/(min|max|std)|"
    r"batch/(?!fill_ratio$|num_micro_batches$).*|timing/(?!(step|gen|update_actor)$).*|ckpt/(?!stall_s$|failures$).*|"
    r"(goodput|rollout|perf/memory_gb)/.*|"
    r"perf/(time_per_step|total_num_tokens|throughput|max_memory_reserved_gb)|train/sequences|"
    r"(actor|train)/(optimizer_steps|grad_clip|kl_coef|pg_clipfrac_lower|reward_kl_penalty_coeff)"
)
"""What a person doesn't read at every step: in the record and in W&B, not on the line."""


def plain_line(
    step: int, total: int, metrics: Mapping[str, Any], eta_s: float | None = None
) -> str:
    """``step:3/10 - critic/score/mean:0.5 - actor/loss:0.1234 - ... - eta:3m05s``, the headline
    first.
    """
    shown = [k for k, v in metrics.items() if v is not None and not _RECORD_ONLY.fullmatch(k)]
    shown.sort(key=lambda k: HEADLINE.index(k) if k in HEADLINE else len(HEADLINE))
    parts = [f"step:{step}/{total}", *(f"{k}:{number(metrics[k])}" for k in shown)]
    return " - ".join(parts if eta_s is None else [*parts, f"eta:{duration(eta_s)}"])


def number(value: Any) -> str:
    """Four significant digits; whole numbers and texts as they are."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def short(metrics: Mapping[str, Any], eta_s: float | None) -> str:
    """The numbers beside the progress bar."""
    parts = [f"{_name(k)} {number(metrics[k])}" for k in HEADLINE if k in metrics][:1]
    if (speed := metrics.get("perf/tokens_per_second")) is not None:
        parts.append(f"{float(speed):,.0f} tok/s")
    parts += [f"{float(metrics[k]):.1f} GB" for k in MEMORY if metrics.get(k)][:1]
    if eta_s is not None:
        parts.append(f"{duration(eta_s)} left")
    return " · ".join(parts)


def _name(key: str) -> str:
    return {"critic/score/mean": "reward", "train/nll": "loss"}.get(key, key.removeprefix("actor/"))


def duration(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h07m``, ``3d04h``."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"
