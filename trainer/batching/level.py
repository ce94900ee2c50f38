"""Levelling: many swaps at once, each between a heavy and a light bin of one row, under the same hard caps."""

from __future__ import annotations

import numpy as np

from trainer.batching.cost import Floats, Ints

BLOCK = 6144
"""Pairs of units weighed at once."""


def level(
    bins: Ints,
    cost: Floats,
    tokens: Ints,
    buckets: Ints,
    budgets: Ints,
    rows: int,
    *,
    passes: int,
    goal: float,
    fills: bool = True,
    moves: bool = True,
) -> Ints:
    """Better bins of the units; bins are numbered ``row * ranks + rank``.

    Each pass pairs heavy bins of a row with light ones (at first the i-th heaviest with the i-th lightest, then with
    the next in turn), the most uneven rows first, and makes in every pair the one swap (or, with ``moves``, move) that
    levels it best. Pairs share no bin, so all swaps of a pass hold at once. ``fills``: a cap limits the sum of a bin's
    tokens; else each unit by itself. Stops after ``passes``, when nothing helps, or within ``goal`` of even rows.
    """
    ranks, units = int(budgets.size), int(cost.size)
    count = ranks * rows
    half = ranks // 2
    if half == 0 or units == 0:
        return bins
    bins = bins.copy()
    caps = np.tile(budgets, rows)
    # Two units that don't exist: nothing (weighs 0), and a place holder that no swap can want.
    weight = np.append(cost, [0.0, 0.0])
    size = np.append(tokens, [0, 0])
    nothing, gap = units, units + 1
    mixed = int(buckets.min()) != int(buckets.max())
    idle = 0
    for turn in range(passes):
        load = np.bincount(bins, cost, minlength=count)
        grid = load.reshape(rows, ranks)
        excess = grid.max(1) - grid.sum(1) / ranks
        if float(excess.sum()) <= goal * float(load.sum()) / ranks:
            break
        order = np.append(bins.argsort(kind="stable"), [nothing, gap])
        held = np.bincount(bins, minlength=count)
        starts = np.cumsum(held) - held
        width = int(held.max()) + 1
        worst = np.argsort(-excess, kind="stable")[: max(1, BLOCK // (half * width * width))]
        seats = grid[worst].argsort(1, kind="stable") + (worst * ranks)[:, None]
        light = np.roll(seats[:, :half], turn, axis=1).reshape(-1)
        heavy = seats[:, ranks - half :][:, ::-1].reshape(-1)
        light, heavy = light[: max(1, BLOCK // width**2)], heavy[: max(1, BLOCK // width**2)]
        if mixed:
            of = np.full(count, -1)
            of[bins] = buckets
            alike = (of[light] == of[heavy]) | (of[light] == -1)
            light, heavy = light[alike], heavy[alike]
            if not light.size:
                continue
        place = np.arange(width)
        i = order[np.where(place < held[heavy][:, None], starts[heavy][:, None] + place, units + 1)]
        j = order[np.where(place < held[light][:, None], starts[light][:, None] + place, units + 1)]
        if moves:
            j[np.arange(light.size), held[light]] = nothing
        gain = weight[i][:, :, None] - weight[j][:, None, :]
        slack = (load[heavy] - load[light])[:, None, None]
        allowed = (gain > 0) & (i != gap)[:, :, None] & (j != gap)[:, None, :]
        if fills:
            room = caps - np.rint(np.bincount(bins, tokens, minlength=count)).astype(np.int64)
            grow = size[i][:, :, None] - size[j][:, None, :]
            allowed &= (grow <= room[light][:, None, None]) & (grow >= -room[heavy][:, None, None])
        else:
            allowed &= (size[i] <= caps[light][:, None])[:, :, None] & (size[j] <= caps[heavy][:, None])[:, None, :]
        score = np.where(allowed, np.abs(gain - slack / 2), np.inf).reshape(light.size, -1)
        best = score.argmin(1)
        pair = np.flatnonzero(score[np.arange(light.size), best] < slack.reshape(-1) * (0.5 - 1e-9))
        idle = 0 if pair.size else idle + 1
        if idle == min(half, 3):
            break
        a, b = np.divmod(best[pair], width)
        left, right = i[pair, a], j[pair, b]
        bins[left] = light[pair]
        real = right != nothing
        bins[right[real]] = heavy[pair][real]
    return bins
