"""Speed and memory of a step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from trainer.tracking.timers import Timers

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
"""Dense bf16 peak in FLOP/s by a part of the device's name (NVIDIA data sheets, without
sparsity).
"""
GB = 1024**3


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s; None for a CPU and for a device that is not in the
    table.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for part in sorted(PEAK_BF16_FLOPS, key=len, reverse=True):  # "H100 PCIe" before "H100"
        if part in name:
            return PEAK_BF16_FLOPS[part]
    return None


def train_flops(
    parameters: int, layers: int, hidden: int, lengths: Sequence[int], *, trained: int | None = None
) -> float:
    """FLOPs of forward and backward over sequences of ``lengths`` tokens [sequences].

    6 N per token for the weights and, for causal attention, half of 12 L h s per token (PaLM,
    arXiv:2204.02311, appendix B): a ragged batch pays the sum of squares of its own lengths, no
    padding. 2 of the 6 are the gradient of the weight itself, which only the ``trained`` parameters
    have (default: all).
    """
    if trained is None:
        trained = parameters
    weights = (4 * parameters + 2 * trained) * sum(lengths)
    attention = 6 * layers * hidden * sum(length * length for length in lengths)
    return float(weights + attention)


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
    the actor's update over all ranks, which took ``update_s`` seconds (default: the whole step);
    ``peak``: FLOP/s of one device.
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


def micro_batch_metrics(tokens: Sequence[int], budget: int) -> dict[str, float]:
    """``batch/micro_batch_tokens/*`` and the budget, from the real tokens of an optimizer step's
    micro-batches over all ranks [micro-batches].

    Zero-loss fillers hold no tokens and don't count.
    """
    counts = [count for count in tokens if count > 0]
    if not counts:
        return {}
    return {
        "batch/micro_batch_tokens/mean": sum(counts) / len(counts),
        "batch/micro_batch_tokens/min": float(min(counts)),
        "batch/micro_batch_tokens/max": float(max(counts)),
        "batch/budget": float(budget),
    }


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Peak device memory since the start and resident memory of this process, in GiB."""
    metrics = {"perf/cpu_memory_used_gb": _resident_bytes() / GB}
    if device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GB
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GB
    return metrics


def memory_in_use(device: torch.device) -> float:
    """GiB that this process holds now: allocated on its device, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / GB
    return _resident_bytes() / GB


def make_timers(device: torch.device) -> Timers:
    """Timers that wait for a GPU's kernels at both ends of a phase and record memory in use."""
    synchronize = None
    if device.type == "cuda":
        synchronize = partial(torch.cuda.synchronize, device)
    return Timers(synchronize=synchronize, memory=partial(memory_in_use, device))


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        return int(psutil.Process().memory_info().rss)
