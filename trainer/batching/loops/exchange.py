"""Swaps for the row that waits most: inside it first, then with rows that wait anyway."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from trainer.batching.loops.bins import Bins, swap
from trainer.batching.loops.primitives import FloatList, IntList, ascending, floats, integers
from trainer.batching.loops.sums import argmax, total
from trainer.batching.loops.swaps import NEAR, Rules, find_swap

GOOD = 0.5
"""A swap that gains this share of what the best partner could allow is taken without a look at the
next partner.
"""
FAR = 2
"""Bins of other rows that are tried as partners, in multiples of the ranks."""


class Rows(NamedTuple):
    """What the bins of each row add up to. All lists are [rows]."""

    pace: FloatList
    """Load of the heaviest bin."""
    mean: FloatList
    """Mean load."""
    excess: FloatList
    """What levelling the row can gain: pace less mean; 0 once nothing helps."""
    inside: IntList
    """Whether swaps inside the row may still help: 1 or 0."""


def exchange(bins: Bins, rules: Rules, ranks: int, tiny: float, goal: float) -> Bins:
    """Swap while it helps, always for the row with the largest excess, until the sum of excesses
    is at most ``goal``.
    """
    count = len(bins.load) // ranks
    rows = Rows(floats(count), floats(count), floats(count), integers(count))
    spare = 0.0
    for row in range(count):
        spare += _update(rows, bins.load, row, ranks)
    waiting = integers(0)
    stale = count
    while rules.work[0] > 0:
        row = argmax(rows.excess, 0, count)
        if spare <= goal or rows.excess[row] <= tiny:
            break
        if rows.inside[row] == 1:
            a, b = _best_inside(bins, rules, row, ranks, tiny)
        else:
            if stale > count // 8:
                waiting = _longest_waiting(bins.load, rows.pace, ranks)
                rules.work[0] -= len(bins.load) // 16
                stale = 0
            a, b = _best_across(bins, rules, rows.pace, waiting, row, ranks, tiny)
        if a < 0:
            if rows.inside[row] == 1 and count > 1:
                rows.inside[row] = 0
            else:
                rows.excess[row] = 0.0
            continue
        other_row = b // (len(bins.pieces) // len(bins.load)) // ranks
        bins = swap(bins, rules.tokens, rules.fills, a, b)
        stale += 1
        spare += _update(rows, bins.load, row, ranks)
        if other_row != row:
            spare += _update(rows, bins.load, other_row, ranks)
    return bins


def _update(rows: Rows, load: FloatList, row: int, ranks: int) -> float:
    """Note the loads of a row anew; by how much its excess has grown."""
    first = row * ranks
    before = rows.pace[row] - rows.mean[row]
    rows.pace[row] = load[argmax(load, first, first + ranks)]
    rows.mean[row] = total(load, first, first + ranks) / ranks
    rows.excess[row] = rows.pace[row] - rows.mean[row]
    rows.inside[row] = 1
    return rows.excess[row] - before


def _best_inside(bins: Bins, rules: Rules, row: int, ranks: int, tiny: float) -> tuple[int, int]:
    """Places of the swap that levels the heaviest bin of a row with a lighter one best, or -1."""
    load = bins.load
    first = row * ranks
    heavy = argmax(load, first, first + ranks)
    order = ascending(load[first : first + ranks])
    good = GOOD * (load[heavy] - load[first + order[0]]) / 2
    best = tiny
    best_a = -1
    best_b = -1
    for i in order:
        half = (load[heavy] - load[first + i]) / 2
        if half <= best or best >= good:
            break
        gain, a, b = find_swap(bins, rules, heavy, first + i, half, half, best)
        if a >= 0:
            best = gain
            best_a = a
            best_b = b
    return best_a, best_b


def _longest_waiting(load: FloatList, pace: FloatList, ranks: int) -> IntList:
    """The bins that wait longest for the heaviest of their row."""
    wait = floats(len(load))
    for b in range(len(load)):
        wait[b] = load[b] - pace[b // ranks]
    return ascending(wait)[: FAR * ranks]


def _best_across(
    bins: Bins,
    rules: Rules,
    pace: FloatList,
    waiting: IntList,
    row: int,
    ranks: int,
    tiny: float,
) -> tuple[int, int]:
    """Places of the swap that moves most load from the heaviest bin of a row to a bin of another
    row that waits anyway, or -1.
    """
    load = bins.load
    first = row * ranks
    heavy = argmax(load, first, first + ranks)
    need = _lead(load, heavy, first, ranks)
    best = tiny
    best_a = -1
    best_b = -1
    for light in waiting:
        spare = pace[light // ranks] - load[light]
        least = min(need, spare)
        if first <= light < first + ranks or least <= best:
            continue
        gain, a, b = find_swap(bins, rules, heavy, light, least, max(need, spare), best)
        if a >= 0:
            best = gain
            best_a = a
            best_b = b
            if best >= (1.0 - NEAR) * need:
                break
    return best_a, best_b


def _lead(load: FloatList, heavy: int, first: int, ranks: int) -> float:
    """How much ``heavy`` weighs more than the next heaviest bin of its row."""
    if ranks == 1:
        return load[heavy]
    second = -inf
    for b in range(first, first + ranks):
        if b != heavy and load[b] > second:
            second = load[b]
    return load[heavy] - second
