"""Metrics as text for people."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HEADLINE = ("critic/score/mean", "val/reward", "train/nll", "actor/loss")
"""The first of these that a step has is its headline: a reward before a loss."""
MEMORY = ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb")
SHORT_NAMES = {"critic/score/mean": "reward", "train/nll": "loss"}
ON_TERMINAL = {
    "critic/score/mean": "reward",
    "val/reward": "validation",
    "train/nll": "loss",
    "actor/pg_loss": "loss",
    "actor/grad_norm": "grad norm",
    "actor/entropy": "entropy",
    "response_length/mean": "length",
    "perf/tokens_per_second": "tok/s",
    "timing/step": "s",
    "batch/fill_ratio": "fill ratio",
}
"""Metric -> its title in a step's line on a terminal; the first ones come first."""
_RECORD_ONLY = re.compile(
    "|".join(
        (
            r"(training|cost|speed|global_seqlen|prompt_length|critic/advantages)/.*",
            r"batch/micro_batch_tokens/.*",
            r".*/(min|max|std)",
            r"batch/(?!fill_ratio$|num_micro_batches$).*",
            r"timing/(?!(step|gen|update_actor)$).*",
            r"ckpt/(?!stall_s$|failures$).*",
            r"(goodput|rollout|perf/memory_gb)/.*",
            r"rollout_corr/(?!kl$).*",
            r"perf/(time_per_step|total_num_tokens|throughput|max_memory_reserved_gb)",
            r"train/sequences",
            r"(actor|train|critic)/(optimizer_steps|grad_clip|kl_coef|pg_clipfrac_lower)",
            r"critic/(vpred_mean|vf_clipfrac|lr|(values|returns)/mean)",
            r"(actor|train)/reward_kl_penalty_coeff",
        )
    )
)
"""Metrics that nobody reads at every step: in the record and in W&B, not on the line."""


def plain_line(
    step: int, total_steps: int, metrics: Mapping[str, Any], eta_s: float | None = None
) -> str:
    """``step:3/10 - critic/score/mean:0.5 - actor/loss:0.1234 - ... - eta:3m05s``, the headline
    first.
    """
    names = [
        name
        for name, value in metrics.items()
        if value is not None and not _RECORD_ONLY.fullmatch(name)
    ]
    names.sort(key=lambda name: HEADLINE.index(name) if name in HEADLINE else len(HEADLINE))
    parts = [f"step:{step}/{total_steps}"]
    parts += [f"{name}:{format_number(metrics[name])}" for name in names]
    if eta_s is not None:
        parts.append(f"eta:{format_duration(eta_s)}")
    return " - ".join(parts)


def progress_text(metrics: Mapping[str, Any], eta_s: float | None) -> str:
    """The numbers beside the progress bar: headline, speed, memory, time left."""
    parts = [
        f"{_short_name(name)} {format_number(metrics[name])}"
        for name in HEADLINE
        if name in metrics
    ][:1]
    speed = metrics.get("perf/tokens_per_second")
    if speed is not None:
        parts.append(f"{float(speed):,.0f} tok/s")
    parts += [f"{float(metrics[name]):.1f} GB" for name in MEMORY if metrics.get(name)][:1]
    if eta_s is not None:
        parts.append(f"{format_duration(eta_s)} left")
    return " · ".join(parts)


def fitted_line(step: int, total_steps: int, metrics: Mapping[str, Any], width: int) -> str:
    """The step in one line of at most ``width`` characters: as many of :data:`ON_TERMINAL` as
    fit, in their order.
    """
    line = f"step {step}/{total_steps}"
    for name, title in ON_TERMINAL.items():
        if metrics.get(name) is None:
            continue
        part = f" · {title} {format_number(metrics[name])}"
        if len(line) + len(part) > width:
            break
        line += part
    return line[:width]


def format_number(value: Any) -> str:
    """Four significant digits; whole numbers and texts as they are."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h07m``, ``3d04h``."""
    s = round(seconds)
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"


def _short_name(name: str) -> str:
    return SHORT_NAMES.get(name, name.removeprefix("actor/"))
