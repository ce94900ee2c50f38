"""Host memory: what was freed goes back to the machine, and worker processes inherit no weights."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from functools import cache

from torch import Tensor

MADV_DONTFORK = 10
ALWAYS_MAPPED = 32 << 20
"""Bytes from which the C library gives a block a mapping of its own, which ends when it is
freed.
"""


def trim_host_memory() -> None:
    """Return what the C library keeps of freed memory to the system, where it can (glibc).

    A CPU's activations are thousands of blocks of a few MB. Freed, they would stay with the process
    and add to the peak of what comes next: the optimizer step, generation.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


def keep_from_children(tensors: Iterable[Tensor]) -> None:
    """Leave large ``tensors`` out of what forked processes inherit. They must not be read there any
    more.

    A data or reward worker would otherwise hold a copy of every page that training has changed
    since the worker began: all weights and all optimizer state of the rank, once per worker.
    """
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "cpu"
    }
    for start, nbytes in storages.items():
        first, last = (
            -(-start // mmap.PAGESIZE) * mmap.PAGESIZE,
            (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE,
        )
        if madvise is not None and nbytes >= ALWAYS_MAPPED:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), MADV_DONTFORK)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
