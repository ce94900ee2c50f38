"""How loops are compiled: once for each machine, kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
import xxhash

from trainer.batching.cost import Floats, Ints

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """``function`` by numba. Every sum keeps its order and nothing is fused, so that floats round
    as in Python.

    Raises RuntimeError where no folder can keep what is compiled, or others own it.
    """
    out = numba.njit(cache=True, no_cfunc_wrapper=True)(function)
    folder = Path(out.stats.cache_path)
    keep_private(folder)
    keep_current(folder)
    return cast(F, out)


def inner(function: F) -> F:
    """``function`` for other loops to call, which holds what they are made of: kept by them, and
    not ready for Python.

    ``compiled`` loops that call each other would each be wrapped for Python and kept by themselves.
    """
    return cast(F, numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(function))


def keep_private(folder: Path) -> None:
    """Code is loaded from ``folder``: let nobody else write there. Beside the sources it is as safe
    as they are.
    """
    if folder.parent == Path(__file__).parent:
        return
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to somebody else")
    folder.chmod(0o700)


@cache
def keep_current(folder: Path) -> None:
    """Forget what ``folder`` holds of other sources of this package. numba itself looks at the file
    of the loop that is called from Python, not at those of the loops that are part of it.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    now, mark = (
        xxhash.xxh3_128_hexdigest(b"\0".join(s.read_bytes() for s in sources)),
        folder / "plimsoll-sources",
    )
    if mark.exists() and mark.read_text() == now:
        return
    for file in (f for s in sources for f in folder.glob(f"{s.stem}.*.nb[ic]")):
        file.unlink(missing_ok=True)  # other ranks are here as well
    new = mark.with_suffix(f".{os.getpid()}")
    new.write_text(now)
    new.replace(mark)


@inner
def left_of(values: Floats | Ints, value: float, many: int) -> int:
    """First place among the first ``many`` values, which rise, that isn't below ``value``."""
    low, high = 0, many
    while low < high:
        middle = (low + high) // 2
        if values[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def order_of(values: Floats, sign: float) -> Ints:
    """Places by rising value (``sign`` 1.0) or falling (-1.0), equal ones in order: merge sort from
    the bottom up.
    """
    many = values.size
    here, there = np.empty(many, np.int64), np.empty(many, np.int64)
    for i in range(many):
        here[i] = i
    width = 1
    while width < many:
        for start in range(0, many, 2 * width):
            a, middle, end = start, min(start + width, many), min(start + 2 * width, many)
            b = middle
            for i in range(start, end):
                if a < middle and (b == end or sign * values[here[a]] <= sign * values[here[b]]):
                    there[i] = here[a]
                    a += 1
                else:
                    there[i] = here[b]
                    b += 1
        here, there = there, here
        width *= 2
    return here


@inner
def total(values: Floats, first: int, last: int) -> float:
    """Sum from left to right."""
    out = 0.0
    for at in range(first, last):
        out += values[at]
    return out


@inner
def most(values: Floats, first: int, last: int) -> int:
    """Place of the first of the largest values."""
    best = first
    for at in range(first + 1, last):
        if values[at] > values[best]:
            best = at
    return best
