"""Bins whose pieces can change places, and the swap of two pieces.

The pieces of bin b are kept from light to heavy at the places ``b * width + FIRST`` to
``b * width + ends[b] - 2`` of two lists, where ``width`` is the number of places of a bin. Before
them come a guard that weighs -inf and "nothing", a piece that weighs 0 and never leaves; after them
comes a guard that weighs inf. The guards stop every search, and to move a piece is to swap it with
nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import NamedTuple

from trainer.batching.loops.multifit import deal
from trainer.batching.loops.primitives import FloatList, IntList, floats, integers

FIRST = 2
"""Places before the first piece of a bin."""


class Bins(NamedTuple):
    """Bins, numbered ``row * ranks + rank``, and the pieces in them."""

    cost: FloatList
    """Cost of the piece at each place [bins * width]."""
    pieces: IntList
    """The piece at each place [bins * width]; -1 is a guard, the number of pieces is nothing."""
    ends: IntList
    """Places taken in each bin, guards included [bins]."""
    load: FloatList
    """Cost of each bin [bins]."""
    room: IntList
    """Tokens left of each cap [bins]; where caps limit pieces by themselves, the cap."""


def fill_bins(
    bins: IntList,
    order: IntList,
    cost: FloatList,
    tokens: IntList,
    budgets: IntList,
    rows: int,
    fills: bool,
) -> Bins:
    """Bins that hold the pieces as ``bins`` [pieces] says; ``order`` are pieces by rising cost."""
    count = rows * len(budgets)
    load = floats(count)
    room = integers(count)
    ends = integers(count)
    for b in range(count):
        room[b] = budgets[b % len(budgets)]
    largest = 0
    for piece in range(len(bins)):
        b = bins[piece]
        load[b] += cost[piece]
        if fills:
            room[b] -= tokens[piece]
        ends[b] += 1
        largest = max(largest, ends[b])
    width = FIRST + largest + 4
    placed_cost = floats(count * width)
    placed = integers(count * width)
    for b in range(count):
        placed_cost[b * width] = -inf
        placed[b * width] = -1
        placed[b * width + 1] = len(bins)
        ends[b] = FIRST
    for piece in order:
        place = bins[piece] * width + ends[bins[piece]]
        placed_cost[place] = cost[piece]
        placed[place] = piece
        ends[bins[piece]] += 1
    for b in range(count):
        placed_cost[b * width + ends[b]] = inf
        placed[b * width + ends[b]] = -1
        ends[b] += 1
    return Bins(placed_cost, placed, ends, load, room)


def bins_of_pieces(bins: Bins, count: int) -> IntList:
    """Bin of each of ``count`` pieces [pieces]."""
    width = len(bins.pieces) // len(bins.load)
    out = integers(count)
    for b in range(len(bins.load)):
        for place in range(b * width + FIRST, b * width + bins.ends[b] - 1):
            out[bins.pieces[place]] = b
    return out


def swap(bins: Bins, tokens: IntList, fills: bool, a: int, b: int) -> Bins:
    """Swap the pieces at places ``a`` and ``b``; nothing stays where it is.

    ``tokens`` are those of each piece and of nothing. Returns the bins, which are new ones when a
    bin had to grow.
    """
    width = len(bins.pieces) // len(bins.load)
    heavy = a // width
    light = b // width
    cost = bins.cost[a]
    piece = bins.pieces[a]
    other_cost = bins.cost[b]
    other = bins.pieces[b]
    _remove(bins, heavy, a)
    if other < len(tokens) - 1:
        _remove(bins, light, b)
        bins = _insert(bins, heavy, other_cost, other)
    bins = _insert(bins, light, cost, piece)
    bins.load[heavy] -= cost - other_cost
    bins.load[light] += cost - other_cost
    if fills:
        freed = tokens[piece] - tokens[other]
        bins.room[heavy] += freed
        bins.room[light] -= freed
    return bins


def _remove(bins: Bins, bin_: int, at: int) -> None:
    """Remove the piece at place ``at`` from its bin."""
    width = len(bins.pieces) // len(bins.load)
    for place in range(at, bin_ * width + bins.ends[bin_] - 1):
        bins.cost[place] = bins.cost[place + 1]
        bins.pieces[place] = bins.pieces[place + 1]
    bins.ends[bin_] -= 1


def _insert(bins: Bins, bin_: int, cost: float, piece: int) -> Bins:
    """Insert a piece where its cost belongs; every bin gets more places when this one is full."""
    if bins.ends[bin_] == len(bins.pieces) // len(bins.load):
        bins = _widened(bins)
    width = len(bins.pieces) // len(bins.load)
    start = bin_ * width
    end = start + bins.ends[bin_]
    at = max(start + FIRST, bisect_left(bins.cost, cost, start, end))
    for place in range(end, at, -1):
        bins.cost[place] = bins.cost[place - 1]
        bins.pieces[place] = bins.pieces[place - 1]
    bins.cost[at] = cost
    bins.pieces[at] = piece
    bins.ends[bin_] += 1
    return bins


def _widened(bins: Bins) -> Bins:
    """The same bins with twice the places."""
    count = len(bins.load)
    width = len(bins.pieces) // count
    cost = floats(count * width * 2)
    pieces = integers(count * width * 2)
    for b in range(count):
        for i in range(bins.ends[b]):
            cost[b * width * 2 + i] = bins.cost[b * width + i]
            pieces[b * width * 2 + i] = bins.pieces[b * width + i]
    return Bins(cost, pieces, bins.ends, bins.load, bins.room)


def rearranged(bins: Bins, budgets: IntList) -> Bins:
    """The same bins in other places, so that those of like load share a row, which never lengthens
    the path.
    """
    count = len(bins.load)
    width = len(bins.pieces) // count
    cost = floats(count * width)
    pieces = integers(count * width)
    ends = integers(count)
    load = floats(count)
    room = integers(count)
    new = deal(bins.load, budgets)
    for old in range(count):
        b = new[old]
        ends[b] = bins.ends[old]
        load[b] = bins.load[old]
        room[b] = bins.room[old]
        for i in range(bins.ends[old]):
            cost[b * width + i] = bins.cost[old * width + i]
            pieces[b * width + i] = bins.pieces[old * width + i]
    return Bins(cost, pieces, ends, load, room)
