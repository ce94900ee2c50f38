"""Refinement: swaps and moves between micro-batches that shorten the critical path, under the same
caps. The work is bounded by counts, never by the clock.
"""

from __future__ import annotations

from math import inf

from trainer.batching.loops.bins import Bins, bins_of_pieces, fill_bins, rearranged, swap
from trainer.batching.loops.exchange import exchange
from trainer.batching.loops.primitives import FloatList, IntList, ascending, integers
from trainer.batching.loops.sums import argmax, path_of_loads, total
from trainer.batching.loops.swaps import Rules, find_swap

ROUNDS = 3
"""Times that rows are refined, with new neighbours each time, which give new exchanges."""
PASSES = 4
"""Passes of levelling in each round."""
TINY = 2e-7
"""Share of the even load below which a gain isn't worth a swap."""


def improve(
    bins: IntList,
    order: IntList,
    cost: FloatList,
    tokens: IntList,
    buckets: IntList,
    budgets: IntList,
    rows: int,
    enough: float,
    work: int,
    fills: bool,
    rising: bool,
) -> IntList:
    """Better bins of the pieces [pieces], by swaps, until the critical path is at most ``enough``,
    nothing helps, or ``work`` pieces were looked at.

    ``order`` are the pieces by rising cost; ``budgets`` are [ranks], all other lists [pieces].
    ``fills``: caps limit the sum of a bin's tokens; else each piece by itself. ``rising``: a
    lighter piece is never a larger one.
    """
    count = len(cost)
    sizes = integers(count + 1)  # of nothing, too
    mixed = False
    for piece in range(count):
        sizes[piece] = tokens[piece]
        mixed = mixed or buckets[piece] != buckets[0]
    left = integers(1)
    left[0] = work
    rules = Rules(sizes, buckets, fills, rising, mixed, left)
    state = fill_bins(bins, order, cost, tokens, budgets, rows, fills)
    ranks = len(budgets)
    even = total(state.load, 0, len(state.load)) / ranks
    tiny = TINY * even
    path = inf
    for _ in range(ROUNDS):
        before = path
        state = level(state, rules, ranks, tiny)
        state = exchange(state, rules, ranks, tiny, enough - even)
        if rows == 1:
            break
        state = rearranged(state, budgets)
        path = path_of_loads(state.load, ranks)
        if path <= enough or path > before - tiny or left[0] <= 0:
            break
    return bins_of_pieces(state, count)


def level(bins: Bins, rules: Rules, ranks: int, tiny: float) -> Bins:
    """Swap between the i-th heaviest and the i-th lightest bin of each row, then with the next in
    turn.
    """
    half = ranks // 2
    idle = 0
    for turn in range(PASSES):
        swaps = 0
        for first in range(0, len(bins.load), ranks):
            bins, swapped = _level_row(bins, rules, first, ranks, turn, tiny)
            swaps += swapped
        idle = 0 if swaps > 0 else idle + 1
        if idle == min(half, 3):
            break
    return bins


def _level_row(
    bins: Bins, rules: Rules, first: int, ranks: int, turn: int, tiny: float
) -> tuple[Bins, int]:
    """One pass over the row that begins with bin ``first``; also returns the number of swaps."""
    load = bins.load
    enough = total(load, first, first + ranks) / ranks + tiny
    if load[argmax(load, first, first + ranks)] <= enough or rules.work[0] <= 0:
        return bins, 0
    half = ranks // 2
    swaps = 0
    order = ascending(load[first : first + ranks])
    for i in range(half):
        heavy = first + order[ranks - 1 - i]
        light = first + order[(i + turn) % half]
        if load[heavy] <= enough:
            break
        apart = (load[heavy] - load[light]) / 2
        _, a, b = find_swap(bins, rules, heavy, light, apart, apart, tiny)
        if a >= 0:
            bins = swap(bins, rules.tokens, rules.fills, a, b)
            swaps += 1
    return bins, swaps
