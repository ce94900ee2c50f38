"""Compiled loops of ``trainer.batching.refine``: the same steps, in the same order.

Constants stand here once more, for numba keeps what it compiled until this file changes; a test
holds both to be equal.
"""

from __future__ import annotations

from math import inf

import numpy as np

from trainer.batching.cost import Floats, Ints
from trainer.batching.fast.jit import compiled, inner, left_of, most, order_of, total
from trainer.batching.fast.packing import deal, path_of

LOOK = 8
NEAR = 0.05
GOOD = 0.5
FAR = 2
TINY = 2e-7
ROUNDS = 3
PASSES = 4


@inner
def seek(
    weights: Floats,
    held: Ints,
    ends: Ints,
    load: Floats,
    room: Ints,
    tokens: Ints,
    buckets: Ints,
    rules: Ints,
    work: Ints,
    heavy: int,
    light: int,
    low: float,
    high: float,
    least: float,
) -> tuple[float, int, int]:
    """``Refiner._search``: (win, place, place), places -1 when there is none."""
    first, fills, rising, mixed = rules[0], rules[1], rules[2], rules[3]
    mine, theirs = ends[heavy], ends[light]
    if (
        mixed
        and theirs > first + 1
        and buckets[held[heavy, mine - 2]] != buckets[held[light, theirs - 2]]
    ):
        return 0.0, -1, -1
    room_light, room_heavy = room[light], room[heavy]
    miss, near = low - least, NEAR * low
    found = partner = -1
    a = mine - 1
    while a > first:
        a -= 1
        weight = weights[heavy, a]
        size = tokens[held[heavy, a]]
        up, down = weight - low, weight - high
        if up <= -miss:
            break
        start = b = left_of(weights[light], down, theirs)
        while weights[light, b] - up < miss:
            other = tokens[held[light, b]]
            if size - fills * other <= room_light and other - fills * size <= room_heavy:
                miss, found, partner = max(0.0, weights[light, b] - up), a, b
                break
            b += 1
            if b == start + LOOK:
                if not rising:
                    break
                until = theirs - 1
                while b < until:
                    middle = (b + until) // 2
                    if tokens[held[light, middle]] < size - room_light:
                        b = middle + 1
                    else:
                        until = middle
        b = start - 1
        while down - weights[light, b] < miss and b >= start - LOOK:
            other = tokens[held[light, b]]
            if size - fills * other <= room_light and other - fills * size <= room_heavy:
                miss, found, partner = down - weights[light, b], a, b
                break
            b -= 1
        if miss <= near:
            break
    work[0] -= mine - a + 1
    return low - miss, found, partner


@inner
def take(weights: Floats, held: Ints, ends: Ints, bin_: int, at: int) -> None:
    """Take the unit at place ``at`` out of a bin."""
    for i in range(at, ends[bin_] - 1):
        weights[bin_, i], held[bin_, i] = weights[bin_, i + 1], held[bin_, i + 1]
    ends[bin_] -= 1


@inner
def put(
    weights: Floats, held: Ints, ends: Ints, first: int, bin_: int, weight: float, unit: int
) -> tuple[Floats, Ints]:
    """Put a unit where its weight belongs; arrays grow when the bin is full."""
    if ends[bin_] == weights.shape[1]:
        wider = np.empty((weights.shape[0], 2 * weights.shape[1]))
        larger = np.empty((weights.shape[0], 2 * weights.shape[1]), np.int64)
        for row in range(
            weights.shape[0]
        ):  # plain loops: to assign a slice takes ten seconds to compile
            for i in range(weights.shape[1]):
                wider[row, i], larger[row, i] = weights[row, i], held[row, i]
        weights, held = wider, larger
    at = max(first, left_of(weights[bin_], weight, ends[bin_]))
    for i in range(ends[bin_], at, -1):
        weights[bin_, i], held[bin_, i] = weights[bin_, i - 1], held[bin_, i - 1]
    weights[bin_, at], held[bin_, at] = weight, unit
    ends[bin_] += 1
    return weights, held


@inner
def swap(
    weights: Floats,
    held: Ints,
    ends: Ints,
    load: Floats,
    room: Ints,
    tokens: Ints,
    rules: Ints,
    heavy: int,
    light: int,
    a: int,
    b: int,
) -> tuple[Floats, Ints]:
    """``Refiner._swap``: exchange the units at the places found."""
    first, units = rules[0], tokens.size - 1
    weight, unit = weights[heavy, a], held[heavy, a]
    other, partner = weights[light, b], held[light, b]
    take(weights, held, ends, heavy, a)
    if partner < units:
        take(weights, held, ends, light, b)
        weights, held = put(weights, held, ends, first, heavy, other, partner)
    weights, held = put(weights, held, ends, first, light, weight, unit)
    load[heavy] -= weight - other
    load[light] += weight - other
    if rules[1]:
        grow = tokens[unit] - tokens[partner]
        room[heavy] += grow
        room[light] -= grow
    return weights, held


@inner
def level(
    weights: Floats,
    held: Ints,
    ends: Ints,
    load: Floats,
    room: Ints,
    tokens: Ints,
    buckets: Ints,
    rules: Ints,
    work: Ints,
    ranks: int,
    tiny: float,
    passes: int,
) -> tuple[Floats, Ints]:
    """``Refiner.level``."""
    half = ranks // 2
    idle = 0
    for turn in range(passes):
        swaps = 0
        for first in range(0, load.size, ranks):
            enough = total(load, first, first + ranks) / ranks + tiny
            if load[most(load, first, first + ranks)] <= enough or work[0] <= 0:
                continue
            order = order_of(load[first : first + ranks], 1.0)
            for i in range(half):
                heavy, light = first + order[ranks - 1 - i], first + order[(i + turn) % half]
                if load[heavy] <= enough:
                    break
                apart = (load[heavy] - load[light]) / 2
                _, a, b = seek(
                    weights,
                    held,
                    ends,
                    load,
                    room,
                    tokens,
                    buckets,
                    rules,
                    work,
                    heavy,
                    light,
                    apart,
                    apart,
                    tiny,
                )
                if a >= 0:
                    weights, held = swap(
                        weights, held, ends, load, room, tokens, rules, heavy, light, a, b
                    )
                    swaps += 1
        idle = 0 if swaps else idle + 1
        if idle == min(half, 3):
            break
    return weights, held


@inner
def run(
    weights: Floats,
    held: Ints,
    ends: Ints,
    load: Floats,
    room: Ints,
    tokens: Ints,
    buckets: Ints,
    rules: Ints,
    work: Ints,
    ranks: int,
    tiny: float,
    goal: float,
) -> tuple[Floats, Ints]:
    """``Refiner.run``, with ``_inside``, ``_look`` and ``_across``."""
    rows = load.size // ranks
    pace, even, urge, inside = (
        np.empty(rows),
        np.empty(rows),
        np.empty(rows),
        np.empty(rows, np.int64),
    )
    spare = 0.0
    for row in range(rows):
        at = row * ranks
        pace[row], even[row] = load[most(load, at, at + ranks)], total(load, at, at + ranks) / ranks
        urge[row] = pace[row] - even[row]
        spare += urge[row]
        inside[row] = 1
    waits = np.empty(rows, np.int64)
    stale = rows
    while work[0] > 0:
        row = most(urge, 0, rows)
        if spare <= goal or urge[row] <= tiny:
            break
        first = row * ranks
        heavy = most(load, first, first + ranks)
        best, light, found, partner = tiny, -1, -1, -1
        if inside[row]:
            order = order_of(load[first : first + ranks], 1.0)
            good = GOOD * (load[heavy] - load[first + order[0]]) / 2
            for place in range(ranks):
                other = first + order[place]
                half = (load[heavy] - load[other]) / 2
                if half <= best or best >= good:
                    break
                win, a, b = seek(
                    weights,
                    held,
                    ends,
                    load,
                    room,
                    tokens,
                    buckets,
                    rules,
                    work,
                    heavy,
                    other,
                    half,
                    half,
                    best,
                )
                if a >= 0:
                    best, light, found, partner = win, other, a, b
        else:
            if stale > rows // 8:
                wait = np.empty(load.size)
                for at in range(load.size):
                    wait[at] = load[at] - pace[at // ranks]
                waits = order_of(wait, 1.0)[: FAR * ranks]
                work[0] -= load.size // 16
                stale = 0
            need = load[heavy]
            if ranks > 1:
                next_ = -inf
                for at in range(first, first + ranks):
                    if at != heavy and load[at] > next_:
                        next_ = load[at]
                need = load[heavy] - next_
            for place in range(waits.size):
                other = int(waits[place])
                room_left = pace[other // ranks] - load[other]
                least = min(need, room_left)
                if first <= other < first + ranks or least <= best:
                    continue
                win, a, b = seek(
                    weights,
                    held,
                    ends,
                    load,
                    room,
                    tokens,
                    buckets,
                    rules,
                    work,
                    heavy,
                    other,
                    least,
                    max(need, room_left),
                    best,
                )
                if a >= 0:
                    best, light, found, partner = win, other, a, b
                    if best >= (1.0 - NEAR) * need:
                        break
        if light < 0:
            if inside[row] and rows > 1:
                inside[row] = 0
            else:
                urge[row] = 0.0
            continue
        weights, held = swap(
            weights, held, ends, load, room, tokens, rules, heavy, light, found, partner
        )
        stale += 1
        for turn in range(1 if light // ranks == row else 2):
            changed = light // ranks if turn else row
            at = changed * ranks
            before = pace[changed] - even[changed]
            pace[changed], even[changed] = (
                load[most(load, at, at + ranks)],
                total(load, at, at + ranks) / ranks,
            )
            urge[changed] = pace[changed] - even[changed]
            spare += urge[changed] - before
            inside[changed] = 1
    return weights, held


@inner
def alike(
    weights: Floats, held: Ints, ends: Ints, load: Floats, room: Ints, budgets: Ints
) -> tuple[Floats, Ints, Ints, Floats, Ints]:
    """``Refiner.alike``."""
    count, width = weights.shape
    new_weights, new_held = np.empty((count, width)), np.empty((count, width), np.int64)
    new_ends, new_load, new_room = (
        np.empty(count, np.int64),
        np.empty(count),
        np.empty(count, np.int64),
    )
    new = deal(load, budgets)
    for old in range(count):
        b = new[old]
        new_ends[b], new_load[b], new_room[b] = ends[old], load[old], room[old]
        for place in range(ends[old]):
            new_weights[b, place], new_held[b, place] = weights[old, place], held[old, place]
    return new_weights, new_held, new_ends, new_load, new_room


@compiled
def improve(
    bins: Ints,
    order: Ints,
    cost: Floats,
    tokens: Ints,
    buckets: Ints,
    budgets: Ints,
    rows: int,
    enough: float,
    work: Ints,
    rules: Ints,
) -> Ints:
    """``search.improve`` from its first exchange on. ``order``: units by rising cost; ``rules``:
    see :func:`seek`.

    Units of bin b are ``held[b, first:ends[b] - 1]``, light to heavy, between the guards that
    ``Refiner`` has.
    """
    first, fills, units, ranks = rules[0], rules[1], cost.size, budgets.size
    count = rows * ranks
    load, room, ends = np.zeros(count), np.empty(count, np.int64), np.zeros(count, np.int64)
    sizes = np.zeros(units + 1, np.int64)  # of nothing, too
    for b in range(count):
        room[b] = budgets[b % ranks]
    width = 0
    for u in range(units):
        b = bins[u]
        load[b] += cost[u]
        room[b] -= fills * tokens[u]
        sizes[u] = tokens[u]
        ends[b] += 1
        width = max(width, ends[b] + first + 4)
    weights, held = np.empty((count, width)), np.empty((count, width), np.int64)
    for b in range(count):
        weights[b, 0], held[b, 0] = -inf, -1
        if first == 2:  # nothing, which may change places with a unit
            weights[b, 1], held[b, 1] = 0.0, units
        ends[b] = first
    for u in order:
        b = bins[u]
        weights[b, ends[b]], held[b, ends[b]] = cost[u], u
        ends[b] += 1
    for b in range(count):
        weights[b, ends[b]], held[b, ends[b]] = inf, -1
        ends[b] += 1
    even = total(load, 0, count) / ranks
    goal, tiny = enough - even, TINY * even
    path = inf
    for _ in range(ROUNDS):
        before = path
        weights, held = level(
            weights, held, ends, load, room, sizes, buckets, rules, work, ranks, tiny, PASSES
        )
        weights, held = run(
            weights, held, ends, load, room, sizes, buckets, rules, work, ranks, tiny, goal
        )
        if rows == 1:
            break
        weights, held, ends, load, room = alike(weights, held, ends, load, room, budgets)
        path = path_of(load, ranks)
        if path <= enough or path > before - tiny or work[0] <= 0:
            break
    out = np.empty(units, np.int64)
    for b in range(count):
        for place in range(first, ends[b] - 1):
            out[held[b, place]] = b
    return out
