"""``mixed_precision=auto``: bfloat16 on hardware that multiplies it, float32 on any other."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Precision = Literal["fp32", "bf16"]
FAST_BF16 = ("amx_bf16", "avx512_bf16")
"""Flags of processors that multiply bfloat16. Without one, torch emulates it some 60 times slower
than float32.
"""
CPUINFO = Path("/proc/cpuinfo")


def resolve_precision(
    setting: Literal["auto", "fp32", "bf16"], *, on_gpu: bool, cpuinfo: Path = CPUINFO
) -> Precision:
    """The type that a rank computes in."""
    if setting != "auto":
        return setting
    return "bf16" if on_gpu or has_fast_bf16(cpuinfo) else "fp32"


def planned_precision(setting: Literal["auto", "fp32", "bf16"]) -> Precision:
    """The type that a plan for GPUs assumes."""
    return "bf16" if setting == "auto" else setting


def has_fast_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this processor multiplies bfloat16; False when the kernel doesn't list its flags."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith(("flags", "Features")):
            return any(flag in line.split() for flag in FAST_BF16)
    return False
