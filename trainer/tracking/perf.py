"""Speed and memory of a step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch

PEAK_BF16_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A40": 149.7e12,
    "L4": 121e12,
}
"""Dense bf16 peak by a part of the device's name, FLOP/s (NVIDIA data sheets; without sparsity).
Longer names first.
"""
GB = 1024**3


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None when it isn't in the table (a CPU, another
    card).
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(
        (PEAK_BF16_FLOPS[k] for k in sorted(PEAK_BF16_FLOPS, key=len, reverse=True) if k in name),
        None,
    )


def train_flops(
    parameters: int, layers: int, hidden: int, lengths: Sequence[int], *, trained: int | None = None
) -> float:
    """FLOPs of forward and backward over sequences of ``lengths`` tokens.

    6 N per token for the weights and, for causal attention, half of 12 L h s per token (PaLM,
    appendix B): a ragged batch pays the sum of squares of its own lengths, no padding. 2 of the 6
    are the gradient of the weight itself: ``trained`` parameters have one (default: all).
    """
    own = parameters if trained is None else trained
    return float(
        (4 * parameters + 2 * own) * sum(lengths)
        + 6 * layers * hidden * sum(n * n for n in lengths)
    )


def throughput_metrics(
    tokens: int,
    seconds: float,
    world_size: int,
    *,
    flops: float | None = None,
    peak: float | None = None,
    update_s: float | None = None,
) -> dict[str, float]:
    """``perf/*`` of one step.

    ``tokens``: real tokens over all ranks; ``seconds``: the step's wall-clock time; ``flops``: of
    the actor's update over all ranks, which took ``update_s`` seconds (the whole step unless told);
    ``peak``: one device's, FLOP/s.
    """
    metrics = {
        "perf/total_num_tokens": float(tokens),
        "perf/time_per_step": seconds,
        "perf/tokens_per_second": tokens / seconds,
        "perf/throughput": tokens / seconds / world_size,
    }
    if flops is not None and peak is not None:
        metrics["perf/mfu/actor"] = flops / (update_s or seconds) / (peak * world_size)
    return metrics


def stowage_metrics(tokens: Sequence[int], budget: int) -> dict[str, float]:
    """Real tokens of an optimizer step's micro-batches, over all ranks, against the budget (what
    the picture shows).

    Zero-loss fillers carry nothing and don't count.
    """
    loaded = [n for n in tokens if n > 0]
    if not loaded:
        return {}
    return {
        "batch/micro_batch_tokens/mean": sum(loaded) / len(loaded),
        "batch/micro_batch_tokens/min": float(min(loaded)),
        "batch/micro_batch_tokens/max": float(max(loaded)),
        "batch/budget": float(budget),
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak device memory since the start of the process and this process's resident memory, both in
    GiB.
    """
    metrics = {"perf/cpu_memory_used_gb": _resident_bytes() / GB}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GB
    return metrics


def memory_in_use(device: torch.device) -> float:
    """GiB that this process holds right now: allocated on its device, or resident on a CPU."""
    return (
        torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident_bytes()
    ) / GB


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        return int(psutil.Process().memory_info().rss)
