"""How loops are compiled: once for each machine, kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

from trainer.batching.cost import Floats, Ints

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``function`` by numba. Every sum keeps its order and nothing is fused, so that floats round as in Python."""
    out: F = numba.njit(cache=True)(function)
    return out


@compiled
def left_of(values: Floats | Ints, value: float, low: int, high: int) -> int:
    """First place in ``values[low:high]``, which rise, that isn't below ``value``."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low
