"""How loops are compiled: once for each machine, kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from trainer.batching.cost import Floats, Ints

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``function`` by numba. Every sum keeps its order and nothing is fused, so that floats round as in Python.

    Raises RuntimeError where no folder can keep what is compiled, or others own it.
    """
    out = numba.njit(cache=True)(function)
    keep_private(Path(out.stats.cache_path))
    return cast(F, out)


def keep_private(folder: Path) -> None:
    """Code is loaded from ``folder``: let nobody else write there. Beside the sources it is as safe as they are."""
    if folder.parent == Path(__file__).parent:
        return
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else")
    folder.chmod(0o700)


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
