"""Metrics as text for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEADLINE = ("critic/score/mean", "val/reward", "train/nll", "actor/loss")
"""The first of these that a step has is its headline: a reward before a loss."""
MEMORY = ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb")
_QUIET = ("/mean", "/std", "/min", "/max")


def plain_line(step: int, total: int, metrics: Mapping[str, Any]) -> str:
    """``step:3/10 - actor/loss:0.1234 - ...``. Window statistics of timers stay in the record."""
    shown = {k: v for k, v in metrics.items() if not (k.startswith("timing/") and k.endswith(_QUIET))}
    return " - ".join([f"step:{step}/{total}", *(f"{k}:{number(v)}" for k, v in shown.items() if v is not None)])


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
