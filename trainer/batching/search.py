"""From sequences to an assignment: greedy placements, the most promising ones refined by swaps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainer.batching import packing
from trainer.batching.assignment import Assignment
from trainer.batching.bounds import LowerBounds
from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.greedy import Placement, greedy_placement
from trainer.batching.loops import accelerated
from trainer.batching.loops.refine import improve
from trainer.batching.pieces import Pieces, cut_groups, group_splits, single_sequences
from trainer.batching.sequences import StepSequences

GOAL = 5e-5
"""Refinement stops this close to what no plan can beat."""
WORK_PER_PIECE = 10
"""Pieces that refinement may look at, in multiples of all pieces."""
LEAST_WORK = 2560
"""Pieces that refinement may always look at: what 5 ms hold for 256 pieces."""
MOST_WORK = 32_768
"""Pieces that refinement may never exceed: what 100 ms hold for 8,192 pieces."""
FINALISTS = 3
"""Ways of splitting groups that are refined; the others are judged by their greedy placement."""
FINALIST_WORK = 0.5
"""Share of the work that each of them may take."""
BEHIND = {"micro": 0.05, "step": 0.2}
"""Share by which a way's greedy placement may be behind the best refined one to be refined, too."""


def search(
    sequences: StepSequences,
    cost: CostModel,
    budgets: Ints,
    sync: str,
    bounds: LowerBounds,
    *,
    keep_groups: bool,
) -> Assignment:
    """An assignment of ``sequences`` under ``budgets`` [ranks]. ``bounds`` say when to stop."""
    if not sequences.lengths.size:
        return Assignment(np.zeros(0, np.int64), np.ones(budgets.size, np.int64))
    if sequences.shared and not keep_groups:
        return _search_splits(sequences, cost, budgets, sync, bounds)
    if keep_groups:
        pieces = cut_groups(sequences, cost, sequences.lengths.size, int(budgets.min()))
    else:
        pieces = single_sequences(sequences, cost)
    greedy = greedy_placement(pieces, budgets, sync, cost.overhead, bounds)
    return assign(pieces, refined(pieces, greedy, budgets, sync, bounds), budgets, sync)


class Split(NamedTuple):
    """A way of splitting groups into pieces, and its greedy placement."""

    path: float
    """Critical path of the placement."""
    number: int
    """Coarse splits have low numbers; of equal paths the coarse one comes first."""
    pieces: Pieces
    greedy: Placement


def _search_splits(
    sequences: StepSequences, cost: CostModel, budgets: Ints, sync: str, bounds: LowerBounds
) -> Assignment:
    """The best assignment over the ways of splitting groups with shared prompts; the most promising
    ways are refined.
    """
    best: Assignment | None = None
    best_path = np.inf
    for split in _promising_splits(sequences, cost, budgets, sync, bounds)[:FINALISTS]:
        if best is not None:
            behind = split.path >= (1.0 + BEHIND[sync]) * best_path
            if behind or shortest_path(split.pieces, budgets, bounds) >= best_path:
                continue
        placement = refined(split.pieces, split.greedy, budgets, sync, bounds, share=FINALIST_WORK)
        assignment = assign(split.pieces, placement, budgets, sync)
        path = critical_path(assignment, sequences, cost, sync)
        if best is None or path < best_path:
            best, best_path = assignment, path
    assert best is not None
    return best


def _promising_splits(
    sequences: StepSequences, cost: CostModel, budgets: Ints, sync: str, bounds: LowerBounds
) -> list[Split]:
    """Splits by the path of their greedy placement, shortest first.

    A split whose pieces cost more than the best path found, even if perfectly balanced, is left
    out.
    """
    by_count: dict[int, Pieces] = {}
    for pieces in group_splits(sequences, cost, int(budgets.min())):
        by_count.setdefault(len(pieces), pieces)
    splits: list[Split] = []
    best_path = np.inf
    for number, pieces in enumerate(by_count.values()):
        if shortest_path(pieces, budgets, bounds) < best_path:
            greedy = greedy_placement(pieces, budgets, sync, cost.overhead, bounds)
            assignment = assign(pieces, greedy, budgets, sync)
            path = critical_path(assignment, sequences, cost, sync)
            splits.append(Split(path, number, pieces, greedy))
            best_path = min(best_path, path)
    return sorted(splits)


def refined(
    pieces: Pieces,
    greedy: Placement,
    budgets: Ints,
    sync: str,
    bounds: LowerBounds,
    *,
    share: float = 1.0,
) -> Placement:
    """The placement after swaps, within ``share`` of the work that a plan may take.

    ``budgets``: int64 [ranks].
    """
    fills = sync == "micro"
    rows = greedy.rows if fills else 1
    goal = GOAL if fills else GOAL / 10
    enough = (1.0 + goal) * shortest_path(pieces, budgets, bounds)
    if packing.path(greedy.bins, pieces.cost, rows, int(budgets.size)) <= enough:
        return greedy
    work = min(max(LEAST_WORK, WORK_PER_PIECE * len(pieces)), MOST_WORK)
    bins: Ints = accelerated(improve, len(pieces))(
        greedy.bins,
        pieces.by_cost.order,
        pieces.cost,
        pieces.tokens,
        pieces.buckets if fills else np.zeros(len(pieces), np.int64),
        budgets,
        rows,
        enough,
        int(share * work),
        fills,
        fills and pieces.by_cost.rising,
    )
    return Placement(bins, greedy.rows)


def assign(pieces: Pieces, placement: Placement, budgets: Ints, sync: str) -> Assignment:
    """The assignment of the sequences; ``budgets`` int64 [ranks].

    Under ``sync="step"`` ranks get as few micro-batches as best-fit needs.
    """
    ranks = int(budgets.size)
    if sync == "step":
        of_piece, counts = packing.open_bins_of_ranks(
            pieces.tokens, placement.bins, pieces.buckets, budgets
        )
    else:
        of_piece = (placement.bins % ranks) * placement.rows + placement.bins // ranks
        counts = np.full(ranks, placement.rows)
    return Assignment(of_piece[pieces.piece_of], counts)


def critical_path(
    assignment: Assignment, sequences: StepSequences, cost: CostModel, sync: str
) -> float:
    """Cost of the step: the sum over k of the slowest rank (micro), or the slowest rank's sum
    (step).
    """
    return path_of_costs(assignment.costs(sequences, cost) + cost.overhead, assignment.counts, sync)


def path_of_costs(costs: Floats, counts: Ints, sync: str) -> float:
    """:func:`critical_path` of micro-batches of these costs [micro-batches], ``counts`` [ranks]."""
    if sync == "micro":
        return float(costs.reshape(counts.size, -1).max(0).sum())
    return float(np.bincount(np.repeat(np.arange(counts.size), counts), costs).max())


def shortest_path(pieces: Pieces, budgets: Ints, bounds: LowerBounds) -> float:
    """A path that no placement of ``pieces`` can beat; ``budgets`` int64 [ranks].

    The bounds count a prompt once, even where its group is split.
    """
    return max(bounds.path, pieces.total_cost / budgets.size)
