"""Compiled loops of ``trainer.batching.packing`` and ``units``: the same steps, in the same order.

Constants stand here once more, see :mod:`trainer.batching.fast.refine`.
"""

from __future__ import annotations

import numpy as np

from trainer.batching.cost import Floats, Ints
from trainer.batching.fast.jit import compiled, inner, left_of, most, order_of

TIGHT = 0.18
BISECTIONS, BISECTED = 4, 16_384


@compiled
def best_fit(sizes: Ints, caps: Ints, share: float) -> Ints:
    """:func:`trainer.batching.packing.best_fit` of falling ``sizes``; the first is -1 when there is
    no room.
    """
    many, cap = caps.size, caps[0]
    whole = int(cap * share)
    room = np.empty(many, np.int64)  # of each opened bin, times many, and its number
    shares, out = np.empty(many), np.empty(sizes.size, np.int64)
    opened = 0
    for b in range(many):
        if caps[b] != cap:  # unlike caps: all are open from the start
            for each in range(many):
                shares[each] = int(caps[each] * share)
            for each in order_of(shares, 1.0):
                room[opened] = int(shares[each]) * many + each
                opened += 1
            break
    for i in range(sizes.size):
        size = sizes[i] * many
        low = left_of(room, size, opened)
        if low < opened:
            left = room[low]
        elif opened < many and sizes[i] <= cap:
            left = max(whole, sizes[i]) * many + opened
            opened += 1
        else:
            out[0] = -1
            break
        out[i] = left % many
        left -= size
        while low > 0 and room[low - 1] > left:
            room[low] = room[low - 1]
            low -= 1
        room[low] = left
    return out


@compiled
def open_bins(rank: Ints, bucket: Ints, sizes: Ints, caps: Ints, counts: Ints) -> Ints:
    """Bin of each unit within its rank; units come by rank, bucket and falling size. Counts bins in
    ``counts``.
    """
    many = sizes.size
    room = np.empty(
        many, np.int64
    )  # of the bins of one rank and bucket, times many, and their number
    out = np.empty(many, np.int64)
    opened = 0
    for i in range(many):
        if i == 0 or rank[i] != rank[i - 1] or bucket[i] != bucket[i - 1]:
            opened = 0
        size = sizes[i] * many
        low = left_of(room, size, opened)
        if low < opened:
            left = room[low]
        else:
            left = caps[rank[i]] * many + counts[rank[i]]
            counts[rank[i]] += 1
            opened += 1
        out[i] = left % many
        left -= size
        while low > 0 and room[low - 1] > left:
            room[low] = room[low - 1]
            low -= 1
        room[low] = left
    return out


@compiled
def cuts(opens: Ints, own: Ints, prompts: Ints, most: Ints, cap: int) -> Ints:
    """Where pieces start, see :func:`trainer.batching.units.pieces`."""
    out = np.empty(own.size, np.int64)
    found = held = count = 0
    for i in range(own.size):
        if opens[i] or count == most[i] or held + own[i] > cap:
            out[found] = i
            found += 1
            held, count = prompts[i], 0
        held += own[i]
        count += 1
    return out[:found]


@inner
def _sink(key: Floats, other: Floats, bins: Ints, size: int, at: int) -> None:
    """Let entry ``at`` of a heap of (key, other, bin) sink to its place."""
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        right = child + 1
        if right < size and _before(key, other, bins, right, child):
            child = right
        if not _before(key, other, bins, child, at):
            return
        _change(key, other, bins, child, at)
        at = child


@inner
def _rise(key: Floats, other: Floats, bins: Ints, at: int) -> None:
    """Let entry ``at`` rise to its place."""
    while at > 0:
        parent = (at - 1) // 2
        if not _before(key, other, bins, at, parent):
            return
        _change(key, other, bins, at, parent)
        at = parent


@inner
def _before(key: Floats, other: Floats, bins: Ints, a: int, b: int) -> bool:
    if key[a] != key[b]:
        return bool(key[a] < key[b])
    if other[a] != other[b]:
        return bool(other[a] < other[b])
    return bool(bins[a] < bins[b])


@inner
def _change(key: Floats, other: Floats, bins: Ints, a: int, b: int) -> None:
    key[a], key[b] = key[b], key[a]
    other[a], other[b] = other[b], other[a]
    bins[a], bins[b] = bins[b], bins[a]


@compiled
def lightest_fit(cost: Floats, sizes: Ints, caps: Ints, fills: bool) -> Ints:
    """:func:`trainer.batching.packing.lightest_fit` of units by falling cost; -1 first when there
    is no room.
    """
    many = caps.size
    room = caps.copy()
    # Two heaps, of bins with room by their load and of those without by their room, largest first.
    load, none, bins = np.zeros(many), np.zeros(many), np.empty(many, np.int64)
    for b in range(many):
        bins[b] = b
    full, held, waits = np.empty(many), np.empty(many), np.empty(many, np.int64)
    ready, waiting = many, 0
    out = np.empty(sizes.size, np.int64)
    for i in range(sizes.size):
        size = sizes[i]
        while waiting > 0 and -full[0] >= size:
            load[ready], none[ready], bins[ready] = held[0], 0.0, waits[0]
            ready += 1
            _rise(load, none, bins, ready - 1)
            waiting -= 1
            _change(full, held, waits, 0, waiting)
            _sink(full, held, waits, waiting, 0)
        while ready > 0 and room[bins[0]] < size:
            full[waiting], held[waiting], waits[waiting] = -float(room[bins[0]]), load[0], bins[0]
            waiting += 1
            _rise(full, held, waits, waiting - 1)
            ready -= 1
            _change(load, none, bins, 0, ready)
            _sink(load, none, bins, ready, 0)
        if ready == 0:
            out[0] = -1
            break
        chosen = bins[0]
        out[i] = chosen
        if fills:
            room[chosen] -= size
        load[0] += cost[i]
        _sink(load, none, bins, ready, 0)
    return out


@compiled
def once(
    bins: Ints, own: Floats, prompts: Floats, groups: Ints, by_group: Ints, many: int
) -> Floats:
    """What each bin holds: ``own`` of every sequence, and once for each group the prompt. See
    ``Layout.weigh``.
    """
    out, extra, seen = np.zeros(many), np.zeros(many), np.full(many, -1)
    for i in range(bins.size):
        out[bins[i]] += own[i]
    for i in by_group:
        if seen[bins[i]] != groups[i]:
            seen[bins[i]] = groups[i]
            extra[bins[i]] += prompts[i]
    for b in range(many):
        out[b] += extra[b]
    return out


@inner
def pull(weights: Floats, sizes: Ints, ids: Ints, many: int, at: int) -> None:
    """Take the entry at place ``at`` out of ``many``."""
    for i in range(at, many - 1):
        weights[i], sizes[i], ids[i] = weights[i + 1], sizes[i + 1], ids[i + 1]


@inner
def up_to(values: Floats | Ints, value: float, many: int) -> int:
    """How many of the first ``many`` values, which rise, are at most ``value``."""
    low, high = 0, many
    while low < high:
        middle = (low + high) // 2
        if values[middle] <= value:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def pace_rows(
    weights: Floats, sizes: Ints, ids: Ints, out: Ints, caps: Ints, rows: int, left: float
) -> tuple[int, int]:
    """The rows of :func:`trainer.batching.packing.fill_rows` that a head paces: rows filled, units
    left in front.
    """
    many, ranks, row = ids.size, caps.size, 0
    keys = np.empty(ranks)
    for r in range(ranks):
        keys[r] = caps[r]
    by_cap = order_of(keys, -1.0)
    slack, room, rank = np.empty(ranks), np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    while many > 0 and row < rows and weights[many - 1] * (rows - row) * ranks > left:
        pace, seated = weights[many - 1], 0
        for r in by_cap:
            at = up_to(sizes, caps[r], many) - 1
            if at >= 0:
                out[ids[at]] = row * ranks + r
                left -= weights[at]
                slack[seated], room[seated], rank[seated] = (
                    pace - weights[at],
                    caps[r] - sizes[at],
                    r,
                )
                seated += 1
                pull(weights, sizes, ids, many, at)
                many -= 1
        for seat in range(seated):
            while True:
                at = min(up_to(sizes, room[seat], many), up_to(weights, slack[seat], many)) - 1
                if at < 0:
                    break
                out[ids[at]] = row * ranks + rank[seat]
                left, slack[seat], room[seat] = (
                    left - weights[at],
                    slack[seat] - weights[at],
                    room[seat] - sizes[at],
                )
                pull(weights, sizes, ids, many, at)
                many -= 1
        row += 1
    return row, many


@inner
def path_of(load: Floats, ranks: int) -> float:
    """The heaviest bin of each row of ``ranks``, summed from the first row on."""
    out = 0.0
    for first in range(0, load.size, ranks):
        out += load[most(load, first, first + ranks)]
    return out


@compiled
def path(bins: Ints, cost: Floats, rows: int, ranks: int) -> float:
    """Critical path of units in bins."""
    return path_of(loads(bins, cost, rows * ranks), ranks)


@inner
def loads(bins: Ints, cost: Floats, many: int) -> Floats:
    """Cost of each bin."""
    out = np.zeros(many)
    for i in range(bins.size):
        out[bins[i]] += cost[i]
    return out


@inner
def deal(load: Floats, budgets: Ints) -> Ints:
    """:func:`trainer.batching.packing.deal`."""
    ranks = budgets.size
    order = order_of(load, -1.0)
    new, same = np.empty(load.size, np.int64), np.empty(ranks, np.int64)
    for leader in range(ranks):
        cap, many = budgets[leader], 0
        for r in range(ranks):
            if budgets[r] == cap:
                same[many] = r
                many += 1
        if same[0] != leader:  # its budget was dealt out already
            continue
        dealt = 0
        for b in order:
            if budgets[b % ranks] == cap:
                row, seat = dealt // many, dealt % many
                new[b] = row * ranks + same[many - 1 - seat if row % 2 else seat]
                dealt += 1
    return new


@inner
def multifit(weights: Floats, sizes: Ints, budgets: Ints, caps: Ints, least: float) -> Ints:
    """:func:`trainer.batching.packing.multifit` over bins of ``caps``. ``least``: share of the room
    that is needed.
    """
    units = sizes.size
    falling, weighed = np.empty(units, np.int64), np.empty(units)
    for i in range(units):
        weighed[i] = sizes[i]
    order = order_of(weighed, -1.0)
    for i in range(units):
        falling[i], weighed[i] = sizes[order[i]], weights[order[i]]
    out, best = np.empty(units, np.int64), -1.0
    low, high = least, 1.0
    share = high
    for _ in range(1 + min(BISECTIONS, BISECTED // max(1, units))):
        bins = best_fit(falling, caps, share)
        if bins[0] < 0:
            if best < 0:
                return bins
            low = share
        else:
            high = share
            load = loads(bins, weighed, caps.size)
            new = deal(load, budgets)
            dealt = np.empty(load.size)
            for b in range(load.size):
                dealt[new[b]] = load[b]
            length = path_of(dealt, budgets.size)
            if best < 0 or length < best:
                best = length
                for i in range(units):
                    out[order[i]] = new[bins[i]]
        share = (low + high) / 2
    return out


@compiled
def fill_rows(
    weights: Floats, sizes: Ints, ids: Ints, budgets: Ints, rows: int, rising: bool, left: float
) -> Ints:
    """:func:`trainer.batching.packing.fill_rows` of units by rising cost; the first is -1 when
    there is no room.

    What no head paces is spread here, too: loops that are part of others are compiled once more
    with each of them.
    """
    ranks, row, many = budgets.size, 0, ids.size
    out = np.empty(many, np.int64)
    if rising and weights[many - 1] * rows * ranks > left:
        weights, sizes, ids = weights.copy(), sizes.copy(), ids.copy()
        row, many = pace_rows(weights, sizes, ids, out, budgets, rows, left)
    if many == 0:
        return out
    if row == rows:
        out[0] = -1
        return out
    weights, sizes, bins, held, room = weights[:many], sizes[:many], (rows - row) * ranks, 0, 0
    caps = np.empty(bins, np.int64)
    for b in range(bins):
        caps[b] = budgets[b % ranks]
        room += caps[b]
    for i in range(many):
        held += sizes[i]
    chosen = np.empty(many, np.int64)
    chosen[0] = -1
    if not (2 * many > 3 * bins and (room - held) * many < TIGHT * held * bins):
        order, falling = order_of(weights, -1.0), np.empty(many)
        for i in range(many):
            falling[i], chosen[i] = weights[order[i]], sizes[order[i]]
        fit = lightest_fit(
            falling, chosen, caps, many > 0
        )  # True would have it compiled once more, for True alone
        chosen[0] = -1
        if fit[0] >= 0:
            for i in range(many):
                chosen[order[i]] = fit[i]
            new = deal(loads(chosen, weights, bins), budgets)
            for i in range(many):
                chosen[i] = new[chosen[i]]
    if chosen[0] < 0:
        chosen = multifit(weights, sizes, budgets, caps, held / room)
    for i in range(many):
        out[ids[i]] = row * ranks + chosen[i]
    if chosen[0] < 0:
        out[0] = -1
    return out
