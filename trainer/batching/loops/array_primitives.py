"""What compiled loops use in place of lists, their sorting and ``bisect``: the same over arrays.

numba's own sorts take long to compile and sort equal values in no certain order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import overload, register_jitable

from trainer.batching.cost import Floats, Ints
from trainer.batching.loops import primitives

Function = Callable[..., Any]


def register() -> None:
    """Let compiled loops call these in place of the functions over lists."""
    for replaced, function in REPLACEMENTS.items():
        overload(replaced, strict=False)(_for_all_types(function))


def _for_all_types(function: Function) -> Function:
    """The form that numba wants: a function that takes types and returns the implementation."""
    return lambda *types: function


def floats(count: int) -> Floats:
    """Zeros float64 [count]."""
    return np.zeros(count, np.float64)


def integers(count: int) -> Ints:
    """Zeros int64 [count]."""
    return np.zeros(count, np.int64)


def first_not_below(values: Floats | Ints, value: float, first: int, last: int) -> int:
    """``bisect_left`` over ``values`` [n]."""
    while first < last:
        middle = (first + last) // 2
        if values[middle] < value:
            first = middle + 1
        else:
            last = middle
    return first


def first_above(values: Floats | Ints, value: float, first: int, last: int) -> int:
    """``bisect_right`` over ``values`` [n]."""
    while first < last:
        middle = (first + last) // 2
        if values[middle] <= value:
            first = middle + 1
        else:
            last = middle
    return first


def ascending(values: Floats) -> Ints:
    """Indices int64 [n] that sort ``values`` [n] upwards; equal values keep their order."""
    order: Ints = _merge_sort(values, 1.0)
    return order


def descending(values: Floats) -> Ints:
    """Indices int64 [n] that sort ``values`` [n] downwards; equal values keep their order."""
    order: Ints = _merge_sort(values, -1.0)
    return order


@register_jitable  # type: ignore[untyped-decorator]
def _merge_sort(values: Floats, sign: float) -> Ints:
    """Indices that sort ``sign * values``, merged from the bottom up."""
    count = values.size
    order = np.empty(count, np.int64)
    merged = np.empty(count, np.int64)
    for i in range(count):
        order[i] = i
    width = 1
    while width < count:
        for start in range(0, count, 2 * width):
            a = start
            middle = min(start + width, count)
            b = middle
            end = min(start + 2 * width, count)
            for i in range(start, end):
                a_left = a < middle
                if a_left and (b == end or sign * values[order[a]] <= sign * values[order[b]]):
                    merged[i] = order[a]
                    a += 1
                else:
                    merged[i] = order[b]
                    b += 1
        order, merged = merged, order
        width *= 2
    return order


REPLACEMENTS: dict[Function, Function] = {
    primitives.floats: floats,
    primitives.integers: integers,
    primitives.ascending: ascending,
    primitives.descending: descending,
    bisect_left: first_not_below,
    bisect_right: first_above,
}
