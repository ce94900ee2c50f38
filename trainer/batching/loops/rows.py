"""First plan of rows: the heaviest pieces pace their rows, the rest is spread evenly.

Bins are numbered row by row: bin ``row * ranks + rank`` is micro-batch ``row`` of that rank.
"""

from __future__ import annotations

from bisect import bisect_right

from trainer.batching.loops.lightest_fit import lightest_fit
from trainer.batching.loops.multifit import deal, multifit
from trainer.batching.loops.primitives import (
    FloatList,
    IntList,
    descending,
    floats,
    integers,
)
from trainer.batching.loops.sums import bin_loads

TIGHT = 0.18
"""Room left in a bin, in mean pieces, below which pieces are packed by size instead of spread by
cost.
"""


def fill_rows(
    cost: FloatList,
    sizes: IntList,
    order: IntList,
    budgets: IntList,
    rows: int,
    rising: bool,
    left: float,
) -> IntList:
    """Bin of each piece over ``rows`` micro-batches of every rank; the first is -1 when the greedy
    finds no room.

    ``cost`` and ``sizes`` are those of the pieces ``order`` [pieces], by rising cost, ``budgets``
    are [ranks], ``rising`` says whether a lighter piece is never a larger one, and ``left`` is the
    cost of all.

    While the heaviest piece left weighs more than an even share of what is left, it sets the pace
    of its row; the rest is spread evenly.
    """
    count = len(order)
    out = integers(count)
    row = 0
    if rising and cost[count - 1] * rows * len(budgets) > left:
        cost = cost.copy()
        sizes = sizes.copy()
        order = order.copy()
        row, count = _pace_rows(cost, sizes, order, out, budgets, rows, left)
    if count == 0:
        return out
    if row == rows:
        out[0] = -1
        return out
    bins = spread(cost[:count], sizes[:count], budgets, rows - row)
    for i in range(count):
        out[order[i]] = row * len(budgets) + bins[i]
    if bins[0] < 0:
        out[0] = -1
    return out


def _pace_rows(
    cost: FloatList,
    sizes: IntList,
    order: IntList,
    out: IntList,
    budgets: IntList,
    rows: int,
    left: float,
) -> tuple[int, int]:
    """Fill the rows that their heaviest piece paces, into ``out``; the other lists lose the pieces.

    The next heaviest pieces go into the same row, and each bin is topped up with the largest
    pieces that keep cap and pace, so that the row carries as much as the wait for its heaviest
    allows. Returns how many rows are full and how many pieces are left, at the front of the lists.
    """
    count = len(order)
    ranks = len(budgets)
    caps = floats(ranks)
    for r in range(ranks):
        caps[r] = float(budgets[r])
    by_cap = descending(caps)
    slack = floats(ranks)
    room = integers(ranks)
    row = 0
    while count > 0 and row < rows and cost[count - 1] * (rows - row) * ranks > left:
        pace = cost[count - 1]
        for r in by_cap:
            at = bisect_right(sizes, budgets[r], 0, count) - 1
            slack[r] = -1.0  # nothing fits
            if at >= 0:
                left -= cost[at]
                slack[r] = pace - cost[at]
                room[r] = budgets[r] - sizes[at]
                _place(cost, sizes, order, count, at, out, row * ranks + r)
                count -= 1
        for r in by_cap:
            while slack[r] >= 0.0:
                most = bisect_right(sizes, room[r], 0, count)
                at = min(most, bisect_right(cost, slack[r], 0, count)) - 1
                if at < 0:
                    break
                left -= cost[at]
                slack[r] -= cost[at]
                room[r] -= sizes[at]
                _place(cost, sizes, order, count, at, out, row * ranks + r)
                count -= 1
        row += 1
    return row, count


def _place(
    cost: FloatList,
    sizes: IntList,
    order: IntList,
    count: int,
    at: int,
    out: IntList,
    bin_: int,
) -> None:
    """Note in ``out`` the bin of the piece at ``at``, and remove it from the first ``count``."""
    out[order[at]] = bin_
    for i in range(at, count - 1):
        cost[i] = cost[i + 1]
        sizes[i] = sizes[i + 1]
        order[i] = order[i + 1]


def spread(cost: FloatList, sizes: IntList, budgets: IntList, rows: int) -> IntList:
    """Bins of equal load as far as caps allow, heavy bins in the first row; the first is -1 when
    there is no room. Pieces come by rising cost.
    """
    count = len(sizes)
    bins = rows * len(budgets)
    caps = integers(bins)
    room = 0
    for b in range(bins):
        caps[b] = budgets[b % len(budgets)]
        room += caps[b]
    held = 0
    for i in range(count):
        held += sizes[i]
    if not is_tight(count, held, bins, room):
        order = descending(cost)
        falling = floats(count)
        ordered_sizes = integers(count)
        for i in range(count):
            falling[i] = cost[order[i]]
            ordered_sizes[i] = sizes[order[i]]
        fit = lightest_fit(falling, ordered_sizes, caps, True)
        if fit[0] >= 0:
            out = integers(count)
            for i in range(count):
                out[order[i]] = fit[i]
            new = deal(bin_loads(out, cost, bins), budgets)
            for i in range(count):
                out[i] = new[out[i]]
            return out
    return multifit(cost, sizes, budgets, caps, held / room)


def is_tight(count: int, held: int, bins: int, room: int) -> bool:
    """Whether caps leave so little room that the lightest bin would be full before the last pieces
    come: ``count`` pieces of ``held`` tokens in ``bins`` bins of ``room`` tokens together.
    """
    return 2 * count > 3 * bins and (room - held) * count < TIGHT * held * bins
