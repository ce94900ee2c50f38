"""``mixed_precision=auto``: bfloat16 where the hardware multiplies it, float32 where it would
crawl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

Precision = Literal["fp32", "bf16"]
FAST_BF16 = ("amx_bf16", "avx512_bf16")
"""Flags of processors that multiply bfloat16. Without one, torch emulates it some 60 times slower
than float32.
"""


def planned(wanted: Literal["auto", "fp32", "bf16"]) -> Precision:
    """What a plan for GPUs reckons with."""
    return "bf16" if wanted == "auto" else wanted


def resolve(
    wanted: Literal["auto", "fp32", "bf16"], *, on_gpu: bool, cpuinfo: Path = Path("/proc/cpuinfo")
) -> Precision:
    """The type that a rank computes in."""
    if wanted != "auto":
        return wanted
    return "bf16" if on_gpu or fast_bf16(cpuinfo) else "fp32"


def fast_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this processor multiplies bfloat16; False where it doesn't say."""
    try:
        flags = next(
            (
                line
                for line in cpuinfo.read_text().splitlines()
                if line.startswith(("flags", "Features"))
            ),
            "",
        )
    except OSError:
        return False
    return any(flag in flags.split() for flag in FAST_BF16)
