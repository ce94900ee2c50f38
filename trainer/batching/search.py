"""From cargo to layout: greedy first layouts for each regime, the most promising one refined."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np

from trainer.batching import packing
from trainer.batching.bounds import Proof
from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.fast import loops
from trainer.batching.layout import Layout
from trainer.batching.refine import Refiner
from trainer.batching.units import Cargo, Units, pieces, singles, stowages

ROW_WORTH = 2e-3
"""One micro-batch more must shorten the critical path by this share: fixed costs outweigh less."""
TIGHT = 0.93
"""Only micro-batches as full as this on average can be so cramped by their caps that one more of
them helps.
"""
GOAL = 5e-5
"""Refinement stops this close to what no plan can beat."""
WORK_PER_UNIT, LEAST_WORK, MOST_WORK = 10, 2560, 32_768
"""Units that refinement may look at: what 5 ms hold for 256 units, 100 ms for 8,192."""
ROUNDS = 3
"""Times that rows are refined, with new neighbours each time, which give new exchanges."""
PASSES = 4
"""Passes of levelling in each round."""
FINALISTS, FINALIST_WORK = 3, 0.5
"""Ways of cutting groups that are refined, each with this share of the work; the others are judged
by their greedy layout.
"""
BEHIND = {"micro": 0.05, "step": 0.2}
"""Share by which a way's greedy layout may be behind the best refined one to be refined, too."""


def search(
    cargo: Cargo, cost: CostModel, budgets: Ints, sync: str, proof: Proof, *, keep_groups: bool
) -> Layout:
    """A layout of ``cargo`` under ``budgets`` for the regime ``sync``. ``proof`` says when to
    stop.
    """
    if not cargo.lengths.size:
        return Layout(np.zeros(0, np.int64), np.ones(budgets.size, np.int64))
    if cargo.shared and not keep_groups:
        return search_ways(cargo, cost, budgets, sync, proof)
    if keep_groups:
        units = pieces(cargo, cost, cargo.lengths.size, int(budgets.min()))
    else:
        units = singles(cargo, cost)
    greedy = start(units, budgets, sync, cost.overhead, proof)
    return place(units, refine(units, greedy, budgets, sync, proof), budgets, sync)


def search_ways(cargo: Cargo, cost: CostModel, budgets: Ints, sync: str, proof: Proof) -> Layout:
    """The best layout over ways of cutting groups with shared prompts; the most promising ways are
    refined.

    A way whose pieces cost more than the best path found, even if perfectly level, is left out.
    """
    found: list[tuple[float, int, Units, Start]] = []
    ways: dict[int, Units] = {}
    for units in stowages(cargo, cost, int(budgets.min())):
        ways.setdefault(len(units), units)
    for number, units in enumerate(ways.values()):
        if not found or least_path(units, budgets, proof) < min(found)[0]:
            greedy = start(units, budgets, sync, cost.overhead, proof)
            path = critical_path(place(units, greedy, budgets, sync), cargo, cost, sync)
            found.append((path, number, units, greedy))
    best: tuple[float, Layout] | None = None
    for behind, _, units, greedy in sorted(found)[:FINALISTS]:
        limit = (1.0 + BEHIND[sync]) * best[0] if best else np.inf
        if best is None or (behind < limit and least_path(units, budgets, proof) < best[0]):
            layout = place(
                units,
                refine(units, greedy, budgets, sync, proof, share=FINALIST_WORK),
                budgets,
                sync,
            )
            path = critical_path(layout, cargo, cost, sync)
            if best is None or path < best[0]:
                best = (path, layout)
    assert best is not None
    return best[1]


class Start(NamedTuple):
    """Bins of units. ``rows`` micro-batches of each rank (bin = row * ranks + rank), or 0 where
    bins are ranks.
    """

    bins: Ints
    rows: int


def start(units: Units, budgets: Ints, sync: str, overhead: float, proof: Proof) -> Start:
    """A greedy layout: of ranks where they meet once a step, else of rows, as many as give the
    shortest path.
    """
    if sync == "step":
        rank = packing.lightest_fit(units.cost, units.tokens, budgets, fills=False)
        if rank is None:
            raise AssertionError("a unit is larger than every budget")
        return Start(rank, 0)
    best: tuple[float, Start] | None = None
    for bins, rows in candidates(units, budgets, proof.micro_batches):
        path = packing.path(bins, units.cost, rows, int(budgets.size))
        more = rows - best[1].rows if best else 0
        if best is None or path * (1.0 + ROW_WORTH * more) + overhead * more < best[0]:
            best = (path, Start(bins, rows))
    assert best is not None
    return best[1]


def refine(
    units: Units, greedy: Start, budgets: Ints, sync: str, proof: Proof, *, share: float = 1.0
) -> Start:
    """The layout after exchanges, within ``share`` of the work that a plan may take."""
    least = least_path(units, budgets, proof)
    if sync == "step":
        alike, enough = np.zeros(len(units), np.int64), (1.0 + GOAL / 10) * least
        bins = improve(
            greedy.bins,
            units.cost,
            units.tokens,
            alike,
            budgets,
            1,
            enough,
            fills=False,
            share=share,
            by_cost=units.by_cost,
        )
    else:
        enough = (1.0 + GOAL) * least
        bins = improve(
            greedy.bins,
            units.cost,
            units.tokens,
            units.buckets,
            budgets,
            greedy.rows,
            enough,
            share=share,
            by_cost=units.by_cost,
        )
    return Start(bins, greedy.rows)


def place(units: Units, found: Start, budgets: Ints, sync: str) -> Layout:
    """The layout of sequences. Under ``sync="step"`` ranks get as few micro-batches as best-fit
    needs.
    """
    ranks = int(budgets.size)
    if sync == "step":
        of_unit, counts = packing.open_bins_of_ranks(
            units.tokens, found.bins, units.buckets, budgets
        )
    else:
        of_unit = (found.bins % ranks) * found.rows + found.bins // ranks
        counts = np.full(ranks, found.rows)
    return Layout(of_unit[units.unit_of], counts)


def critical_path(layout: Layout, cargo: Cargo, cost: CostModel, sync: str) -> float:
    """Cost of the step: the sum over k of the slowest rank (micro), or the slowest rank's sum
    (step).
    """
    weight = layout.costs(cargo, cost) + cost.overhead
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
    share: float = 1.0,
    by_cost: packing.ByCost | None = None,
) -> Ints:
    """Better bins, by exchanges, until the critical path is at most ``enough``, nothing helps or
    the work is done.
    """
    if packing.path(bins, cost, rows, int(budgets.size)) <= enough:
        return bins
    work = int(share * min(max(LEAST_WORK, WORK_PER_UNIT * int(cost.size)), MOST_WORK))
    compiled = loops("refine", int(cost.size))
    if compiled is not None:
        sorted_ = by_cost or packing.ByCost.of(cost, tokens)
        mixed = int(buckets.min()) != int(buckets.max())
        rules = np.array([2 if moves else 1, fills, fills and sorted_.rising, mixed], np.int64)
        better: Ints = compiled.improve(
            bins,
            sorted_.order,
            cost,
            tokens,
            buckets,
            budgets,
            rows,
            enough,
            np.array([work]),
            rules,
        )
        return better
    refiner = Refiner(
        bins, cost, tokens, buckets, budgets, rows, enough, work=work, fills=fills, moves=moves
    )
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
    """What no layout of ``units`` can beat: the proof counts a prompt once, even where its group is
    cut.
    """
    return max(proof.path, units.weight / budgets.size)


def candidates(units: Units, budgets: Ints, fewest: int) -> list[tuple[Ints, int]]:
    """Greedy layouts (bins, rows) with rising numbers of rows, from ``fewest`` on."""
    ranks = int(budgets.size)
    if units.mixed:
        return [bucketed(units, budgets)]
    found: list[tuple[Ints, int]] = []
    held, room, least = units.held, int(budgets.sum()), int(budgets.min())
    enough = (1.0 + 2.0 * ROW_WORTH) * units.weight / ranks
    if least * ranks == room and packing.tight(units.tokens, budgets, fewest):
        # What best-fit needs in the end; below it attempt after attempt would fail.
        fewest = max(
            fewest, -(-(int(packing.open_bins(units.tokens, int(budgets[0])).max()) + 1) // ranks)
        )
    for rows in count(fewest):
        bins = packing.fill_rows(units.by_cost, budgets, rows)
        if bins is not None:
            found.append((bins, rows))
            loose = held < TIGHT * rows * room
            if len(found) == 2 or loose or packing.path(bins, units.cost, rows, ranks) <= enough:
                break
    even = -(-held // (ranks * least))
    if even > found[-1][1]:
        for rows in {even, even + 1, (found[-1][1] + even) // 2}:
            bins = packing.fill_rows(units.by_cost, budgets, rows)
            if bins is not None:
                found.append((bins, rows))
    return found


def bucketed(units: Units, budgets: Ints) -> tuple[Ints, int]:
    """Rows whose bins hold one bucket each; buckets are laid out one by one and their bins dealt
    out together.
    """
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
        heaviest = max(
            range(len(parts)),
            key=lambda b: weight[b] / needs[b] if needs[b] < parts[b].size else -1.0,
        )
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
