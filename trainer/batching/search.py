"""From cargo to layout: greedy first layouts for each regime, the most promising one refined."""

from __future__ import annotations

from itertools import count

import numpy as np

from trainer.batching import packing
from trainer.batching.bounds import path_bound
from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.layout import Layout
from trainer.batching.level import level
from trainer.batching.refine import Refiner
from trainer.batching.units import Cargo, Units, pieces, singles, stowages

ROW_WORTH = 2e-3
"""One micro-batch more must shorten the critical path by this share: fixed costs outweigh less."""
TIGHT = 0.93
"""Only micro-batches as full as this on average can be so cramped by their caps that one more of them helps."""
GOAL = 5e-5
"""Refinement stops this close to the perfect split."""
PASSES, TRIES = 6, 24
"""Passes of bulk levelling, and single exchanges after them."""
MANY_ROWS = 32
"""From here on rows are dealt and refined three times: new neighbours give new exchanges."""
FINALISTS = 3
"""Ways of cutting groups that are refined; the others are judged by their greedy layout."""


def search(cargo: Cargo, cost: CostModel, budgets: Ints, sync: str, *, keep_groups: bool) -> Layout:
    """A layout of ``cargo`` under ``budgets`` for the regime ``sync``."""
    if not cargo.lengths.size:
        return Layout(np.zeros(0, np.int64), np.ones(budgets.size, np.int64))
    if not (cargo.shared or keep_groups):
        return stow(singles(cargo, cost), budgets, sync, cost.overhead)
    cap = int(budgets.min())
    if keep_groups:
        return stow(pieces(cargo, cost, cargo.lengths.size, cap), budgets, sync, cost.overhead)
    ways = stowages(cargo, cost, cap)
    rough = [critical_path(stow(w, budgets, sync, cost.overhead, refine=False), cargo, cost, sync) for w in ways]
    best = sorted(range(len(ways)), key=rough.__getitem__)[:FINALISTS]
    layouts = [stow(ways[w], budgets, sync, cost.overhead) for w in sorted(best)]
    return min(layouts, key=lambda layout: critical_path(layout, cargo, cost, sync))


def stow(units: Units, budgets: Ints, sync: str, overhead: float, *, refine: bool = True) -> Layout:
    """The layout of sequences that one way of cutting units gives."""
    layout = by_step(units, budgets, refine) if sync == "step" else by_micro(units, budgets, overhead, refine)
    bins = np.empty(units.members.size, np.int64)
    bins[units.members] = np.repeat(layout.bins, np.diff(units.starts))
    return Layout(bins, layout.counts)


def critical_path(layout: Layout, cargo: Cargo, cost: CostModel, sync: str) -> float:
    """Cost of the step: the sum over k of the slowest rank (micro), or the slowest rank's sum (step)."""
    weight = layout.weigh(cargo, cost)[1] + cost.overhead
    if sync == "micro":
        return float(weight.reshape(layout.counts.size, -1).max(0).sum())
    return float(np.bincount(np.repeat(np.arange(layout.counts.size), layout.counts), weight).max())


def improve(
    bins: Ints,
    cost: Floats,
    tokens: Ints,
    buckets: Ints,
    budgets: Ints,
    rows: int,
    goal: float,
    *,
    fills: bool = True,
    moves: bool = True,
) -> Ints:
    """Better bins: levelled in bulk, then one exchange at a time. What 5 ms hold for 256 units, 100 ms for 8,192.

    Between these, whole bins change places so that those of like weight share a row, which never lengthens the path.
    Nothing is tried once the path is within ``goal`` of what no plan can beat. Many rows get more tries: their caps are
    small beside the cargo, so that every row has a rest of its own to level.
    """
    bound = path_bound(cost, tokens, budgets, total=float(cost.sum()), sync="micro" if rows > 1 else "step")
    enough = (1.0 + goal) * bound
    half = (PASSES + rows // 8) // 2
    for _ in range(2):
        if _path(bins, cost, rows, int(budgets.size)) <= enough:
            return bins
        bins = level(bins, cost, tokens, buckets, budgets, rows, passes=half, goal=goal, fills=fills, moves=moves)
        bins = _alike(bins, cost, budgets, rows)
    if _path(bins, cost, rows, int(budgets.size)) <= enough:
        return bins
    for _ in range(3 if rows > MANY_ROWS else 1):
        refiner = Refiner(bins, cost, tokens, buckets, budgets, rows, fills=fills, moves=moves)
        refiner.run(TRIES + 2 * (rows - 1), goal)
        bins = _alike(refiner.bins[: cost.size], cost, budgets, rows)
    return bins


def _alike(bins: Ints, cost: Floats, budgets: Ints, rows: int) -> Ints:
    if rows == 1:
        return bins
    load = np.bincount(bins, cost, minlength=rows * budgets.size).astype(np.float64)
    return packing.deal(load, budgets)[bins]


def by_step(units: Units, budgets: Ints, refine: bool) -> Layout:
    """Ranks first (equal cost), then as few micro-batches as fit inside each rank."""
    rank = packing.lightest_fit(units.cost, units.tokens, budgets, fills=False)
    if rank is None:
        raise AssertionError("a unit is larger than every budget")
    if refine:
        alike = np.zeros(len(units), np.int64)
        rank = improve(rank, units.cost, units.tokens, alike, budgets, 1, GOAL / 10, fills=False)
    bins, counts = packing.open_bins_of_ranks(units.tokens, rank, units.buckets, budgets)
    return Layout(bins, counts)


def by_micro(units: Units, budgets: Ints, overhead: float, refine: bool) -> Layout:
    """Equal counts on all ranks: the number of rows that gives the shortest critical path, refined."""
    ranks = int(budgets.size)
    best: tuple[float, Ints, int] | None = None
    for bins, rows in candidates(units, budgets):
        path = _path(bins, units.cost, rows, ranks)
        worth = path * (1.0 + ROW_WORTH * (rows - best[2])) if best else path
        if best is None or worth + overhead * (rows - best[2]) < best[0]:
            best = (path, bins, rows)
    assert best is not None
    _, bins, rows = best
    if refine:
        bins = improve(bins, units.cost, units.tokens, units.buckets, budgets, rows, GOAL)
    return Layout((bins % ranks) * rows + bins // ranks, np.full(ranks, rows))


def candidates(units: Units, budgets: Ints) -> list[tuple[Ints, int]]:
    """Greedy layouts (bins, rows) with rising numbers of rows."""
    ranks = int(budgets.size)
    if int(units.buckets.min()) != int(units.buckets.max()):
        return [bucketed(units, budgets)]
    fewest = max(1, -(-int(units.tokens.sum()) // int(budgets.sum())))
    found: list[tuple[Ints, int]] = []
    enough = (1.0 + 2.0 * ROW_WORTH) * float(units.cost.sum()) / ranks
    for rows in count(fewest):
        bins = packing.fill_rows(units.cost, units.tokens, budgets, rows)
        if bins is not None:
            found.append((bins, rows))
            loose = units.tokens.sum() < TIGHT * rows * budgets.sum()
            if len(found) == 2 or loose or _path(bins, units.cost, rows, ranks) <= enough:
                break
    even = -(-int(units.tokens.sum()) // (ranks * int(budgets.min())))
    if even > found[-1][1]:
        for rows in {even, even + 1, (found[-1][1] + even) // 2}:
            bins = packing.fill_rows(units.cost, units.tokens, budgets, rows)
            if bins is not None:
                found.append((bins, rows))
    return found


def bucketed(units: Units, budgets: Ints) -> tuple[Ints, int]:
    """Rows whose bins hold one bucket each; buckets are laid out one by one and their bins dealt out together."""
    ranks = int(budgets.size)
    names = np.unique(units.buckets)
    parts = [np.flatnonzero(units.buckets == name) for name in names]
    if int(budgets.min()) != int(budgets.max()):
        return _stacked(units, parts, budgets)
    cap = int(budgets[0])
    needs = [int(packing.open_bins(units.tokens[p], cap).max()) + 1 for p in parts]
    rows = -(-sum(needs) // ranks)
    weight = [float(units.cost[p].sum()) for p in parts]
    for _ in range(rows * ranks - sum(needs)):
        heaviest = max(range(len(parts)), key=lambda b: weight[b] / needs[b] if needs[b] < parts[b].size else -1.0)
        needs[heaviest] += 1
    bins = np.empty(len(units), np.int64)
    first = 0
    for part, need in zip(parts, needs, strict=True):
        caps = np.full(need, cap)
        inside = packing.lightest_fit(units.cost[part], units.tokens[part], caps)
        if inside is None:
            inside = packing.open_bins(units.tokens[part], cap)
        bins[part] = first + inside
        first += need
    loads = np.bincount(bins, units.cost, minlength=rows * ranks).astype(np.float64)
    return packing.deal(loads, budgets)[bins], rows


def _stacked(units: Units, parts: list[Ints], budgets: Ints) -> tuple[Ints, int]:
    """Rows of one bucket each, bucket after bucket."""
    bins = np.empty(len(units), np.int64)
    total = 0
    for part in parts:
        inside, rows = candidates(
            Units(units.tokens[part], units.cost[part], np.zeros(part.size, np.int64), part, part), budgets
        )[0]
        bins[part] = total * budgets.size + inside
        total += rows
    return bins, total


def _path(bins: Ints, cost: Floats, rows: int, ranks: int) -> float:
    return float(np.bincount(bins, cost, minlength=rows * ranks).reshape(rows, ranks).max(1).sum())
