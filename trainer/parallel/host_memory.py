"""Host memory: freed memory goes back to the machine, and forked processes inherit no weights."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable
from functools import cache

from torch import Tensor

MADV_DONTFORK = 10
MIN_OWN_MAPPING = 32 << 20
"""Bytes from which the C library gives a block a mapping of its own, which ends when it is
freed.
"""


def trim_host_memory() -> None:
    """Return what the C library keeps of freed memory to the system, where it can (glibc).

    A CPU's activations are thousands of blocks of a few MB. Freed, they would stay with the process
    and add to the peak of what comes next: the optimizer step, generation.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


def exclude_from_forks(tensors: Iterable[Tensor]) -> None:
    """Leave large ``tensors`` out of what forked processes inherit, which must not read them.

    A data or reward worker would otherwise hold a copy of every page that training has changed
    since the worker began: all weights and all optimizer state of the rank, once per worker.
    """
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return
    sizes = {}
    for tensor in tensors:
        if tensor.device.type == "cpu":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    for start, nbytes in sizes.items():
        if nbytes < MIN_OWN_MAPPING:
            continue
        first_page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(ctypes.c_void_p(first_page), ctypes.c_size_t(end - first_page), MADV_DONTFORK)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim
