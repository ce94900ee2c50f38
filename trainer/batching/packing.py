"""First layouts: units into micro-batches under hard caps. Everything here is greedy; refinement comes after.

Bins are numbered row by row: bin ``k * ranks + r`` is micro-batch k of rank r.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heappop, heappush, heapreplace

import numpy as np

from trainer.batching.cost import Floats, Ints

TIGHT = 0.18
"""Room left in a bin, in mean units, below which units are packed by size instead of spread by weight."""
BISECTIONS, BISECTED = 4, 16_384
"""Attempts to pack tight cargo more evenly, and the units that they may pack together."""


def open_bins(tokens: Ints, cap: int) -> Ints:
    """Bin of each unit by best-fit decreasing, opening bins of ``cap`` tokens as needed. Bins count from 0."""
    bins = best_fit(tokens, np.full(tokens.size, cap))
    if bins is None:
        raise AssertionError("a unit is larger than the cap")
    return bins


def open_bins_of_ranks(tokens: Ints, rank: Ints, buckets: Ints, budgets: Ints) -> tuple[Ints, Ints]:
    """Like :func:`open_bins` for every rank and bucket by itself; bins are numbered rank by rank.

    Returns the bin of each unit and the bins of each rank, at least one (a rank without units runs a filler).
    """
    caps = budgets.tolist()
    out = np.empty(tokens.size, np.int64)
    counts = [0] * len(caps)
    order = np.lexsort((-tokens, buckets, rank))
    many = int(tokens.size)
    room: list[int] = []  # of the bins of one rank and bucket: room x many + bin
    at_rank, at_bucket, total = 0, -1, 0
    numbers = []
    parts = zip(rank[order].tolist(), buckets[order].tolist(), (tokens[order] * many).tolist(), strict=True)
    for r, bucket, size in parts:
        if r != at_rank or bucket != at_bucket:
            if r != at_rank:
                total += sum(max(1, c) for c in counts[at_rank:r])
            room, at_rank, at_bucket = [], r, bucket
        at = bisect_left(room, size)
        if at < len(room):
            left = room.pop(at)
        else:
            left = caps[r] * many + counts[r]
            counts[r] += 1
        numbers.append(total + left % many)
        insort(room, left - size)
    out[order] = numbers
    return out, np.maximum(1, np.array(counts, np.int64))


def best_fit(tokens: Ints, caps: Ints, *, share: float = 1.0) -> Ints | None:
    """Bin of each unit by best-fit decreasing over bins of ``caps`` tokens, or None when one finds no room.

    ``share`` lowers the caps to that part of them; where all are equal a unit above it may still have a bin alone.
    """
    many = int(caps.size)
    # One number a bin, its room and then its index: numbers are found faster than pairs. Bins of one cap are only
    # listed once they are opened.
    room = [int(cap * share) * many + b for b, cap in enumerate(caps.tolist())]
    closed = many if room and int(caps.min()) == int(caps.max()) else 0
    whole, most = (room[0], int(caps[0]) * many) if room else (0, 0)
    room = [] if closed else sorted(room)
    opened = 0
    out = np.empty(tokens.size, np.int64)
    order = np.argsort(-tokens, kind="stable")
    chosen = []
    for size in (tokens[order] * many).tolist():
        at = bisect_left(room, size)
        if at < len(room):
            left = room.pop(at)
        elif opened < closed and size <= most:
            left, opened = max(whole, size) + opened, opened + 1
        else:
            return None
        chosen.append(left % many)
        insort(room, left - size)
    out[order] = chosen
    return out


def multifit(cost: Floats, tokens: Ints, budgets: Ints, rows: int) -> Ints | None:
    """:func:`best_fit` under caps lowered by bisection as far as it still finds room, so that bins fill evenly.

    Coffman, Garey and Johnson (1978), with best-fit for first-fit. Returns the dealt bins of the shortest path found.
    """
    ranks = int(budgets.size)
    caps = np.tile(budgets, rows)
    best: tuple[float, Ints] | None = None
    low, high = int(tokens.sum()) / int(caps.sum()), 1.0
    share = high
    for _ in range(1 + min(BISECTIONS, BISECTED // max(1, tokens.size))):
        bins = best_fit(tokens, caps, share=share)
        if bins is None:
            if best is None:
                return None
            low = share
        else:
            high = share
            load = np.bincount(bins, cost, minlength=caps.size).astype(np.float64)
            new = deal(load, budgets)
            dealt = np.empty_like(load)
            dealt[new] = load
            path = float(dealt.reshape(rows, ranks).max(1).sum())
            if best is None or path < best[0]:
                best = (path, new[bins])
        share = (low + high) / 2
    return None if best is None else best[1]


def lightest_fit(cost: Floats, tokens: Ints, caps: Ints, *, fills: bool = True) -> Ints | None:
    """Bin of each unit, heaviest first, into the lightest bin with room, or None when one finds no room.

    ``fills=False``: a cap limits each unit by itself instead of their sum (a rank with many micro-batches).
    Bins without room wait in a heap of their own until a unit comes that they hold.
    """
    load = [(0.0, b) for b in range(caps.size)]
    waiting: list[tuple[int, float, int]] = []
    room = caps.tolist()
    out = np.empty(tokens.size, np.int64)
    order = np.argsort(-cost, kind="stable")
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
    """Whether caps leave so little room that the lightest bin would be full before the last units come."""
    held, bins = int(tokens.sum()), rows * int(budgets.size)
    return 2 * tokens.size > 3 * bins and (rows * int(budgets.sum()) - held) * tokens.size < TIGHT * held * bins


def fill_rows(cost: Floats, tokens: Ints, budgets: Ints, rows: int) -> Ints | None:
    """Bin of each unit over ``rows`` micro-batches of every rank, or None when the greedy finds no room.

    While the heaviest unit left weighs more than an even share of what is left, it sets the pace of its row: the next
    heaviest stand beside it, and each bin is topped up with the largest units that keep cap and pace, so that the row
    carries as much as the wait for its head allows. The rest is spread evenly and its bins are dealt out by weight.
    """
    ranks = int(budgets.size)
    by_cap = np.argsort(-budgets, kind="stable").tolist()
    caps = budgets.tolist()
    order = np.argsort(cost, kind="stable")
    weights, sizes, ids = cost[order].tolist(), tokens[order].tolist(), order.tolist()
    monotone = bool((np.diff(tokens[order]) >= 0).all())
    left = float(cost.sum())
    out = np.full(cost.size, -1, np.int64)
    row = 0
    while monotone and ids and row < rows and weights[-1] * (rows - row) * ranks > left:
        pace, gaps = weights[-1], []
        for r in by_cap:
            at = bisect_right(sizes, caps[r]) - 1
            if at >= 0:
                weight, size = weights.pop(at), sizes.pop(at)
                out[ids.pop(at)] = row * ranks + r
                left -= weight
                gaps.append((pace - weight, caps[r] - size, r))
        for slack, room, r in gaps:
            while True:
                at = min(bisect_right(sizes, room), bisect_right(weights, slack)) - 1
                if at < 0:
                    break
                weight, size = weights.pop(at), sizes.pop(at)
                out[ids.pop(at)] = row * ranks + r
                left, slack, room = left - weight, slack - weight, room - size
        row += 1
    if ids:
        rest = np.array(ids)
        bins = spread(cost[rest], tokens[rest], budgets, rows - row)
        if bins is None:
            return None
        out[rest] = row * ranks + bins
    return out


def spread(cost: Floats, tokens: Ints, budgets: Ints, rows: int) -> Ints | None:
    """Bins of equal weight as far as caps allow, heavy bins in the first row; None when there is no room."""
    if rows < 1:
        return None
    caps = np.tile(budgets, rows)
    bins = None if tight(tokens, budgets, rows) else lightest_fit(cost, tokens, caps)
    if bins is None:
        return multifit(cost, tokens, budgets, rows)
    return deal(np.bincount(bins, cost, minlength=caps.size).astype(np.float64), budgets)[bins]


def deal(weight: Floats, budgets: Ints) -> Ints:
    """New number of each bin: among ranks of one budget the heaviest bins share a row.

    ``weight`` [rows * ranks]. Every other row is dealt backwards, so that no rank gets the heavier bin each time.
    """
    ranks = int(budgets.size)
    new = np.empty(weight.size, np.int64)
    caps = set(budgets.tolist())
    if len(caps) == 1:  # the usual case, without the search for the seats
        seats = np.arange(weight.size).reshape(-1, ranks)
        seats[1::2] = seats[1::2, ::-1]
        new[np.argsort(-weight, kind="stable")] = seats.reshape(-1)
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
