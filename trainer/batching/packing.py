"""First layouts: units into micro-batches under hard caps. Everything here is greedy; refinement
comes after.

Bins are numbered row by row: bin ``k * ranks + r`` is micro-batch k of rank r.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from operator import neg
from typing import NamedTuple

import numpy as np

from trainer.batching.cost import Floats, Ints
from trainer.batching.fast import loops

TIGHT = 0.18
"""Room left in a bin, in mean units, below which units are packed by size instead of spread by
weight.
"""
BISECTIONS, BISECTED = 4, 16_384
"""Attempts to pack tight cargo more evenly, and the units that they may pack together."""


def open_bins(tokens: Ints, cap: int) -> Ints:
    """Bin of each unit by best-fit decreasing, opening bins of ``cap`` tokens as needed. Bins count
    from 0.
    """
    bins = best_fit(tokens, np.full(tokens.size, cap))
    if bins is None:
        raise AssertionError("a unit is larger than the cap")
    return bins


def open_bins_of_ranks(tokens: Ints, rank: Ints, buckets: Ints, budgets: Ints) -> tuple[Ints, Ints]:
    """Like :func:`open_bins` for every rank and bucket by itself; bins are numbered rank by rank.

    Returns the bin of each unit and the bins of each rank, at least one (a rank without units runs
    a filler).
    """
    order = np.lexsort((-tokens, buckets, rank))
    parts = rank[order], buckets[order], tokens[order]
    counts = np.zeros(budgets.size, np.int64)
    compiled = loops("packing", int(tokens.size))
    inside = (compiled.open_bins if compiled is not None else _open_bins)(*parts, budgets, counts)
    counts = np.maximum(1, counts)
    out = np.empty(tokens.size, np.int64)
    out[order] = (np.cumsum(counts) - counts)[parts[0]] + inside
    return out, counts


def _open_bins(rank: Ints, bucket: Ints, sizes: Ints, caps: Ints, counts: Ints) -> Ints:
    """Bin of each unit within its rank; units come by rank, bucket and falling size. Counts bins in
    ``counts``.
    """
    many = int(sizes.size)
    opened, most = [0] * int(caps.size), caps.tolist()
    room: list[int] = []  # of the bins of one rank and bucket: room x many + bin
    last = (-1, -1)
    numbers = []
    for r, which, size in zip(rank.tolist(), bucket.tolist(), (sizes * many).tolist(), strict=True):
        if (r, which) != last:
            room, last = [], (r, which)
        at = bisect_left(room, size)
        if at < len(room):
            left = room.pop(at)
        else:
            left = most[r] * many + opened[r]
            opened[r] += 1
        numbers.append(left % many)
        insort(room, left - size)
    counts[:] = opened
    return np.array(numbers, np.int64)


def best_fit(tokens: Ints, caps: Ints, *, share: float = 1.0) -> Ints | None:
    """Bin of each unit by best-fit decreasing over bins of ``caps`` tokens, or None when one finds
    no room.

    ``share`` lowers the caps to that part of them; where all are equal a unit above it may still
    have a bin alone.
    """
    order = np.argsort(-tokens, kind="stable")
    chosen = _best_fit(tokens[order], caps, share)
    if chosen is None:
        return None
    out = np.empty(tokens.size, np.int64)
    out[order] = chosen
    return out


def _best_fit(tokens: Ints, of_bins: Ints, share: float) -> Ints | None:
    """:func:`best_fit` of falling ``tokens``."""
    many = int(of_bins.size)
    if not many or not tokens.size:
        return None if tokens.size else np.empty(0, np.int64)
    compiled = loops("packing", int(tokens.size))
    if compiled is not None:
        found: Ints = compiled.best_fit(tokens, of_bins, share)
        return found if found[0] >= 0 else None
    sizes: list[int] = tokens.tolist()
    caps: list[int] = of_bins.tolist()
    # One number a bin, its room and then its index: numbers are found faster than pairs. Bins of
    # one cap are only listed once they are opened; the last number is larger than all, and found
    # when no bin has room.
    most = max(caps)
    whole, end = int(most * share), (most + 1) * many
    opened = many
    if min(caps) < most:
        room = sorted([int(cap * share) * many + b for b, cap in enumerate(caps)])
        rest, chosen = sizes, []
    else:
        # No two units above half of the cap share a bin, and the room that they leave rises.
        opened = bisect_left(sizes, -(whole // 2), key=neg)
        if sizes[0] > most or opened > many:
            return None
        room = [max(0, whole - size) * many + b for b, size in enumerate(sizes[:opened])]
        rest, chosen = sizes[opened:], list(range(opened))
    room.append(end)
    pop, choose = room.pop, chosen.append
    for size in rest:
        wanted = size * many
        left = pop(bisect_left(room, wanted))
        if left == end:
            room.append(end)
            if opened == many:
                return None
            left, opened = whole * many + opened, opened + 1
        choose(left)
        insort(room, left - wanted)
    return np.array(chosen, np.int64) % many


def multifit(cost: Floats, tokens: Ints, budgets: Ints, rows: int) -> Ints | None:
    """:func:`best_fit` under caps lowered by bisection as far as it still finds room, so that bins
    fill evenly.

    Coffman, Garey and Johnson (1978), with best-fit for first-fit. Returns the dealt bins of the
    shortest path found.
    """
    ranks = int(budgets.size)
    caps = np.tile(budgets, rows)
    order = np.argsort(-tokens, kind="stable")
    weights, sizes = cost[order], tokens[order]
    best: tuple[float, Ints] | None = None
    low, high = int(tokens.sum()) / int(caps.sum()), 1.0
    share = high
    for _ in range(1 + min(BISECTIONS, BISECTED // max(1, tokens.size))):
        bins = _best_fit(sizes, caps, share)
        if bins is None:
            if best is None:
                return None
            low = share
        else:
            high = share
            load = np.bincount(bins, weights, minlength=caps.size).astype(np.float64)
            new = deal(load, budgets)
            dealt = np.empty_like(load)
            dealt[new] = load
            path = path_of(dealt, ranks)
            if best is None or path < best[0]:
                best = (path, new[bins])
        share = (low + high) / 2
    if best is None:
        return None
    out = np.empty(tokens.size, np.int64)
    out[order] = best[1]
    return out


def lightest_fit(cost: Floats, tokens: Ints, caps: Ints, *, fills: bool = True) -> Ints | None:
    """Bin of each unit, heaviest first, into the lightest bin with room, or None when one finds no
    room.

    ``fills=False``: a cap limits each unit by itself instead of their sum (a rank with many
    micro-batches). Bins without room wait in a heap of their own until a unit comes that they hold.
    """
    out = np.empty(tokens.size, np.int64)
    order = np.argsort(-cost, kind="stable")
    compiled = loops("packing", int(tokens.size))
    if compiled is not None:
        found: Ints = compiled.lightest_fit(cost[order], tokens[order], caps, fills)
        if found[0] < 0:
            return None
        out[order] = found
        return out
    load = [(0.0, b) for b in range(caps.size)]
    waiting: list[tuple[int, float, int]] = []
    room = caps.tolist()
    chosen = []
    for weight, size in zip(cost[order].tolist(), tokens[order].tolist(), strict=True):
        while waiting and -waiting[0][0] >= size:
            _, held, b = heappop(waiting)
            heappush(load, (held, b))
        while load and room[load[0][1]] < size:
            held, b = heappop(load)
            heappush(waiting, (-room[b], held, b))
        if not load:
            return None
        held, b = load[0]
        chosen.append(b)
        if fills:
            room[b] -= size
        heapreplace(load, (held + weight, b))
    out[order] = chosen
    return out


def tight(tokens: Ints, budgets: Ints, rows: int) -> bool:
    """Whether caps leave so little room that the lightest bin would be full before the last units
    come.
    """
    held, bins = int(tokens.sum()), rows * int(budgets.size)
    return (
        2 * tokens.size > 3 * bins
        and (rows * int(budgets.sum()) - held) * tokens.size < TIGHT * held * bins
    )


def path_of(load: Floats, ranks: int) -> float:
    """The heaviest bin of each row of ``ranks``, summed from the first row on (``sum`` would go
    about it in pairs).
    """
    return float(np.cumsum(load.reshape(-1, ranks).max(1))[-1])


def path(bins: Ints, cost: Floats, rows: int, ranks: int) -> float:
    """Critical path of units in bins."""
    compiled = loops("packing", int(cost.size))
    if compiled is not None:
        length: float = compiled.path(bins, cost, rows, ranks)
        return length
    return path_of(np.bincount(bins, cost, minlength=rows * ranks).astype(np.float64), ranks)


class ByCost(NamedTuple):
    """Units by rising cost: what :func:`fill_rows` and exchanges begin with, for any number of
    rows.
    """

    order: Ints
    weights: Floats
    sizes: Ints
    rising: bool
    """Whether a lighter unit is never a larger one."""
    total: float
    """Cost of all."""

    @classmethod
    def of(cls, cost: Floats, tokens: Ints) -> ByCost:
        """Sort them."""
        order = np.argsort(cost, kind="stable")
        sizes = tokens[order]
        return cls(
            order, cost[order], sizes, bool((sizes[1:] >= sizes[:-1]).all()), float(cost.sum())
        )


def fill_rows(by_cost: ByCost, budgets: Ints, rows: int) -> Ints | None:
    """Bin of each unit over ``rows`` micro-batches of every rank, or None when the greedy finds no
    room.

    While the heaviest unit left weighs more than an even share of what is left, it sets the pace of
    its row: the next heaviest stand beside it, and each bin is topped up with the largest units
    that keep cap and pace, so that the row carries as much as the wait for its head allows. The
    rest is spread evenly and its bins are dealt out by weight.
    """
    order, weights, sizes, rising, left = by_cost
    compiled = loops("packing", int(order.size))
    if compiled is not None:
        found: Ints = compiled.fill_rows(weights, sizes, order, budgets, rows, rising, left)
        return found if found[0] >= 0 else None
    out = np.full(order.size, -1, np.int64)
    ids, row = list(range(order.size)), 0
    if rising and float(weights[-1]) * rows * budgets.size > left:
        row = _pace_rows(weights.tolist(), sizes.tolist(), ids, out, budgets, rows, left)
    if ids:
        bins = spread(weights[ids], sizes[ids], budgets, rows - row)
        if bins is None:
            return None
        out[ids] = row * budgets.size + bins
    chosen = np.empty_like(out)
    chosen[order] = out
    return chosen


def _pace_rows(
    heavy: list[float],
    large: list[int],
    ids: list[int],
    out: Ints,
    budgets: Ints,
    rows: int,
    left: float,
) -> int:
    """Fill the rows that a head paces, into ``out``, and take their units from the lists. Returns
    how many rows.
    """
    caps, by_cap = budgets.tolist(), np.argsort(-budgets, kind="stable").tolist()
    ranks, row = len(caps), 0
    while ids and row < rows and heavy[-1] * (rows - row) * ranks > left:
        pace, gaps = heavy[-1], []
        for r in by_cap:
            at = bisect_right(large, caps[r]) - 1
            if at >= 0:
                weight, size = heavy.pop(at), large.pop(at)
                out[ids.pop(at)] = row * ranks + r
                left -= weight
                gaps.append((pace - weight, caps[r] - size, r))
        for slack, room, r in gaps:
            while True:
                at = min(bisect_right(large, room), bisect_right(heavy, slack)) - 1
                if at < 0:
                    break
                weight, size = heavy.pop(at), large.pop(at)
                out[ids.pop(at)] = row * ranks + r
                left, slack, room = left - weight, slack - weight, room - size
        row += 1
    return row


def spread(cost: Floats, tokens: Ints, budgets: Ints, rows: int) -> Ints | None:
    """Bins of equal weight as far as caps allow, heavy bins in the first row; None when there is no
    room.
    """
    if rows < 1:
        return None
    caps = np.tile(budgets, rows)
    bins = None if tight(tokens, budgets, rows) else lightest_fit(cost, tokens, caps)
    if bins is None:
        return multifit(cost, tokens, budgets, rows)
    return deal(np.bincount(bins, cost, minlength=caps.size).astype(np.float64), budgets)[bins]


@lru_cache(maxsize=64)
def _seats(bins: int, ranks: int) -> Ints:
    """Bins in the order in which they are dealt, to and fro."""
    seats = np.arange(bins).reshape(-1, ranks)
    seats[1::2] = seats[1::2, ::-1]
    return seats.reshape(-1)


def deal(weight: Floats, budgets: Ints) -> Ints:
    """New number of each bin: among ranks of one budget the heaviest bins share a row.

    ``weight`` [rows * ranks]. Every other row is dealt backwards, so that no rank gets the heavier
    bin each time.
    """
    ranks = int(budgets.size)
    new = np.empty(weight.size, np.int64)
    caps = set(budgets.tolist())
    if len(caps) == 1:  # the usual case, without the search for the seats
        new[np.argsort(-weight, kind="stable")] = _seats(int(weight.size), ranks)
        return new
    rank = np.arange(weight.size) % ranks
    for cap in sorted(caps):
        same = np.flatnonzero(budgets == cap)
        numbers = np.flatnonzero(budgets[rank] == cap)
        order = numbers[np.argsort(-weight[numbers], kind="stable")]
        row, seat = np.divmod(np.arange(order.size), same.size)
        seat = np.where(row % 2, same.size - 1 - seat, seat)
        new[order] = row * ranks + same[seat]
    return new
