"""From cargo to layout: greedy first layouts for each regime, the most promising one refined."""

from __future__ import annotations

from itertools import count

import numpy as np

from trainer.batching import packing
from trainer.batching.bounds import Proof
from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.layout import Layout
from trainer.batching.refine import Refiner
from trainer.batching.units import Cargo, Units, pieces, singles, stowages

ROW_WORTH = 2e-3
"""One micro-batch more must shorten the critical path by this share: fixed costs outweigh less."""
TIGHT = 0.93
"""Only micro-batches as full as this on average can be so cramped by their caps that one more of them helps."""
GOAL = 5e-5
"""Refinement stops this close to what no plan can beat."""
WORK_PER_UNIT, LEAST_WORK, MOST_WORK = 10, 2560, 32_768
"""Units that refinement may look at: what 5 ms hold for 256 units, 100 ms for 8,192."""
ROUNDS = 3
"""Times that rows are refined, with new neighbours each time, which give new exchanges."""
PASSES = 4
"""Passes of levelling in each round."""
FINALISTS = 3
"""Ways of cutting groups that are refined; the others are judged by their greedy layout."""


def search(cargo: Cargo, cost: CostModel, budgets: Ints, sync: str, proof: Proof, *, keep_groups: bool) -> Layout:
    """A layout of ``cargo`` under ``budgets`` for the regime ``sync``. ``proof`` says when to stop."""
    if not cargo.lengths.size:
        return Layout(np.zeros(0, np.int64), np.ones(budgets.size, np.int64))
    if not (cargo.shared or keep_groups):
        return stow(singles(cargo, cost), budgets, sync, cost.overhead, proof)
    cap = int(budgets.min())
    if keep_groups:
        return stow(pieces(cargo, cost, cargo.lengths.size, cap), budgets, sync, cost.overhead, proof)
    ways = stowages(cargo, cost, cap)
    rough = [critical_path(stow(w, budgets, sync, cost.overhead, proof, refine=False), cargo, cost, sync) for w in ways]
    best = sorted(range(len(ways)), key=rough.__getitem__)[:FINALISTS]
    layouts = [stow(ways[w], budgets, sync, cost.overhead, proof) for w in sorted(best)]
    return min(layouts, key=lambda layout: critical_path(layout, cargo, cost, sync))


def stow(units: Units, budgets: Ints, sync: str, overhead: float, proof: Proof, *, refine: bool = True) -> Layout:
    """The layout of sequences that one way of cutting units gives."""
    if sync == "step":
        layout = by_step(units, budgets, proof, refine)
    else:
        layout = by_micro(units, budgets, overhead, proof, refine)
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
    enough: float,
    *,
    fills: bool = True,
    moves: bool = True,
) -> Ints:
    """Better bins, by exchanges, until the critical path is at most ``enough``, nothing helps or the work is done."""
    if _path(bins, cost, rows, int(budgets.size)) <= enough:
        return bins
    work = min(max(LEAST_WORK, WORK_PER_UNIT * int(cost.size)), MOST_WORK)
    refiner = Refiner(bins, cost, tokens, buckets, budgets, rows, enough, work=work, fills=fills, moves=moves)
    path = np.inf
    for _ in range(ROUNDS):
        before = path
        refiner.level(PASSES)
        refiner.run()
        if rows == 1:
            break
        refiner.alike()
        path = refiner.path()
        if path <= enough or path > before - refiner.tiny or refiner.work <= 0:
            break
    return refiner.bins()


def least_path(units: Units, budgets: Ints, proof: Proof) -> float:
    """What no layout of ``units`` can beat: the proof counts a prompt once, even where its group is cut."""
    return max(proof.path, float(units.cost.sum()) / budgets.size)


def by_step(units: Units, budgets: Ints, proof: Proof, refine: bool) -> Layout:
    """Ranks first (equal cost), then as few micro-batches as fit inside each rank."""
    rank = packing.lightest_fit(units.cost, units.tokens, budgets, fills=False)
    if rank is None:
        raise AssertionError("a unit is larger than every budget")
    if refine:
        alike = np.zeros(len(units), np.int64)
        enough = (1.0 + GOAL / 10) * least_path(units, budgets, proof)
        rank = improve(rank, units.cost, units.tokens, alike, budgets, 1, enough, fills=False)
    bins, counts = packing.open_bins_of_ranks(units.tokens, rank, units.buckets, budgets)
    return Layout(bins, counts)


def by_micro(units: Units, budgets: Ints, overhead: float, proof: Proof, refine: bool) -> Layout:
    """Equal counts on all ranks: the number of rows that gives the shortest critical path, refined."""
    ranks = int(budgets.size)
    best: tuple[float, Ints, int] | None = None
    for bins, rows in candidates(units, budgets, proof.micro_batches):
        path = _path(bins, units.cost, rows, ranks)
        worth = path * (1.0 + ROW_WORTH * (rows - best[2])) if best else path
        if best is None or worth + overhead * (rows - best[2]) < best[0]:
            best = (path, bins, rows)
    assert best is not None
    _, bins, rows = best
    if refine:
        enough = (1.0 + GOAL) * least_path(units, budgets, proof)
        bins = improve(bins, units.cost, units.tokens, units.buckets, budgets, rows, enough)
    return Layout((bins % ranks) * rows + bins // ranks, np.full(ranks, rows))


def candidates(units: Units, budgets: Ints, fewest: int) -> list[tuple[Ints, int]]:
    """Greedy layouts (bins, rows) with rising numbers of rows, from ``fewest`` on."""
    ranks = int(budgets.size)
    if int(units.buckets.min()) != int(units.buckets.max()):
        return [bucketed(units, budgets)]
    found: list[tuple[Ints, int]] = []
    enough = (1.0 + 2.0 * ROW_WORTH) * float(units.cost.sum()) / ranks
    if len(set(budgets.tolist())) == 1 and packing.tight(units.tokens, budgets, fewest):
        # What best-fit needs in the end; below it attempt after attempt would fail.
        fewest = max(fewest, -(-(int(packing.open_bins(units.tokens, int(budgets[0])).max()) + 1) // ranks))
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
        one = Units(units.tokens[part], units.cost[part], np.zeros(part.size, np.int64), part, part)
        fewest = -(-int(one.tokens.sum()) // int(budgets.sum()))
        inside, rows = candidates(one, budgets, fewest)[0]
        bins[part] = total * budgets.size + inside
        total += rows
    return bins, total


def _path(bins: Ints, cost: Floats, rows: int, ranks: int) -> float:
    return float(np.bincount(bins, cost, minlength=rows * ranks).reshape(rows, ranks).max(1).sum())
