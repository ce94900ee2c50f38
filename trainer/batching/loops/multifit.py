"""Multifit, and the dealing out of bins to ranks.

Bins are numbered row by row: bin ``row * ranks + rank`` is micro-batch ``row`` of that rank.
"""

from __future__ import annotations

from trainer.batching.loops.best_fit import best_fit
from trainer.batching.loops.primitives import FloatList, IntList, descending, floats, integers
from trainer.batching.loops.sums import bin_loads, path_of_loads

BISECTIONS = 4
"""Attempts to pack a tight step more evenly."""
BISECTED = 16_384
"""Pieces that these attempts may pack together."""


def multifit(
    cost: FloatList, sizes: IntList, budgets: IntList, caps: IntList, least: float
) -> IntList:
    """Best-fit decreasing under caps lowered by bisection as far as it still finds room, so that
    bins fill evenly.

    Coffman, Garey and Johnson (1978), with best-fit for first-fit. ``least`` is the share of the
    caps [bins] that the pieces need at least. Returns the dealt bins [pieces] of the shortest path;
    the first is -1 when there is no room.
    """
    count = len(sizes)
    as_floats = floats(count)
    for i in range(count):
        as_floats[i] = float(sizes[i])
    order = descending(as_floats)
    falling = integers(count)
    ordered_cost = floats(count)
    for i in range(count):
        falling[i] = sizes[order[i]]
        ordered_cost[i] = cost[order[i]]
    out = integers(count)
    out[0] = -1
    best = -1.0
    low = least
    high = 1.0
    share = high
    for _ in range(1 + min(BISECTIONS, BISECTED // max(1, count))):
        bins = best_fit(falling, caps, share)
        if bins[0] < 0:
            if best < 0:
                return bins
            low = share
        else:
            high = share
            load = bin_loads(bins, ordered_cost, len(caps))
            new = deal(load, budgets)
            length = _path_dealt(load, new, len(budgets))
            if best < 0 or length < best:
                best = length
                for i in range(count):
                    out[order[i]] = new[bins[i]]
        share = (low + high) / 2
    return out


def _path_dealt(load: FloatList, new: IntList, ranks: int) -> float:
    """Critical path of bins of these loads with ``new`` numbers."""
    dealt = floats(len(load))
    for b in range(len(load)):
        dealt[new[b]] = load[b]
    return path_of_loads(dealt, ranks)


def deal(load: FloatList, budgets: IntList) -> IntList:
    """New number of each bin [bins]: among ranks of one budget the heaviest bins share a row.

    Every other row is dealt backwards, so that no rank gets the heavier bin each time.
    """
    ranks = len(budgets)
    order = descending(load)
    new = integers(len(load))
    alike = integers(ranks)
    for leader in range(ranks):
        cap = budgets[leader]
        count = 0
        for r in range(ranks):
            if budgets[r] == cap:
                alike[count] = r
                count += 1
        if alike[0] != leader:  # its budget was dealt out already
            continue
        dealt = 0
        for b in order:
            if budgets[b % ranks] == cap:
                row = dealt // count
                column = dealt % count
                if row % 2 == 1:
                    column = count - 1 - column
                new[b] = row * ranks + alike[column]
                dealt += 1
    return new
