"""Host memory that was freed goes back to the machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache


def trim_host_memory() -> None:
    """Return what the C library keeps of freed memory to the system, where it can (glibc).

    A CPU's activations are thousands of blocks of a few MB. Freed, they would stay with the process and add to the peak
    of what comes next: the optimizer step, generation.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
