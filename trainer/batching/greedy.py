"""Greedy placements of pieces, which refinement starts from."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np

from trainer.batching import packing
from trainer.batching.bounds import LowerBounds
from trainer.batching.cost import Ints
from trainer.batching.loops.rows import is_tight
from trainer.batching.pieces import Pieces

ROW_WORTH = 2e-3
"""One micro-batch more must shorten the critical path by this share: fixed costs outweigh less."""
NEARLY_FULL = 0.93
"""Only micro-batches as full as this on average can be so cramped by their caps that one more of
them helps.
"""


class Placement(NamedTuple):
    """Bin of each piece."""

    bins: Ints
    """int64 [pieces]: ``row * ranks + rank``, or the rank where ``rows`` is 0."""
    rows: int
    """Micro-batches of each rank; 0 where bins are ranks."""


def greedy_placement(
    pieces: Pieces, budgets: Ints, sync: str, overhead: float, bounds: LowerBounds
) -> Placement:
    """A placement on ranks where they synchronise once a step, else in rows, as many as give the
    shortest path.

    ``budgets`` are [ranks]; ``overhead`` is the cost of a micro-batch.
    """
    if sync == "step":
        ranks = packing.fit_lightest(pieces.cost, pieces.tokens, budgets, fills=False)
        if ranks is None:
            raise AssertionError("a piece is larger than every budget")
        return Placement(ranks, 0)
    best: Placement | None = None
    best_path = np.inf
    for placement in candidates(pieces, budgets, bounds.micro_batches):
        path = packing.path(placement.bins, pieces.cost, placement.rows, int(budgets.size))
        more = placement.rows - best.rows if best is not None else 0
        if path * (1.0 + ROW_WORTH * more) + overhead * more < best_path:
            best = placement
            best_path = path
    assert best is not None
    return best


def candidates(pieces: Pieces, budgets: Ints, fewest: int) -> list[Placement]:
    """Greedy placements with rising numbers of rows, from ``fewest`` on; ``budgets`` [ranks]."""
    ranks = int(budgets.size)
    if pieces.mixed:
        return [_place_buckets(pieces, budgets)]
    room = int(budgets.sum())
    least_budget = int(budgets.min())
    enough = (1.0 + 2.0 * ROW_WORTH) * pieces.total_cost / ranks
    one_budget = least_budget * ranks == room
    if one_budget and is_tight(len(pieces), pieces.total_tokens, fewest * ranks, fewest * room):
        # What best-fit needs in the end; below it attempt after attempt would fail.
        bins = packing.open_bins(pieces.tokens, least_budget)
        fewest = max(fewest, -(-(int(bins.max()) + 1) // ranks))
    placements: list[Placement] = []
    for rows in count(fewest):
        bins_of_rows = packing.fill_rows(pieces.by_cost, budgets, rows)
        if bins_of_rows is None:
            continue
        placements.append(Placement(bins_of_rows, rows))
        loose = pieces.total_tokens < NEARLY_FULL * rows * room
        if len(placements) == 2 or loose:
            break
        if packing.path(bins_of_rows, pieces.cost, rows, ranks) <= enough:
            break
    even = -(-pieces.total_tokens // (ranks * least_budget))
    if even > placements[-1].rows:  # budgets differ: rows that the smallest ones could fill alone
        for rows in {even, even + 1, (placements[-1].rows + even) // 2}:
            bins_of_rows = packing.fill_rows(pieces.by_cost, budgets, rows)
            if bins_of_rows is not None:
                placements.append(Placement(bins_of_rows, rows))
    return placements


def _place_buckets(pieces: Pieces, budgets: Ints) -> Placement:
    """Rows whose bins hold one bucket each; buckets are placed one by one and their bins dealt
    out together.
    """
    ranks = int(budgets.size)
    parts = [np.flatnonzero(pieces.buckets == bucket) for bucket in np.unique(pieces.buckets)]
    if int(budgets.min()) != int(budgets.max()):
        return _stack_buckets(pieces, parts, budgets)
    cap = int(budgets[0])
    needs, rows = _bins_of_buckets(pieces, parts, cap, ranks)
    bins = np.empty(len(pieces), np.int64)
    first = 0
    for part, need in zip(parts, needs, strict=True):
        inside = packing.fit_lightest(pieces.cost[part], pieces.tokens[part], np.full(need, cap))
        if inside is None:
            inside = packing.open_bins(pieces.tokens[part], cap)
        bins[part] = first + inside
        first += need
    loads = np.bincount(bins, pieces.cost, minlength=rows * ranks).astype(np.float64)
    return Placement(packing.deal(loads, budgets)[bins], rows)


def _bins_of_buckets(
    pieces: Pieces, parts: list[Ints], cap: int, ranks: int
) -> tuple[list[int], int]:
    """Bins of each bucket, whose pieces are ``parts``, and the rows that all of them fill."""
    needs = [int(packing.open_bins(pieces.tokens[part], cap).max()) + 1 for part in parts]
    rows = -(-sum(needs) // ranks)
    cost = [float(pieces.cost[part].sum()) for part in parts]

    def load(b: int) -> float:
        return cost[b] / needs[b] if needs[b] < parts[b].size else -1.0

    for _ in range(rows * ranks - sum(needs)):
        needs[max(range(len(parts)), key=load)] += 1
    return needs, rows


def _stack_buckets(pieces: Pieces, parts: list[Ints], budgets: Ints) -> Placement:
    """Rows of one bucket each, bucket after bucket."""
    bins = np.empty(len(pieces), np.int64)
    rows = 0
    for part in parts:
        bucket = Pieces(
            pieces.tokens[part], pieces.cost[part], np.zeros(part.size, np.int64), part, part
        )
        fewest = -(-bucket.total_tokens // int(budgets.sum()))
        placement = candidates(bucket, budgets, fewest)[0]
        bins[part] = rows * budgets.size + placement.bins
        rows += placement.rows
    return Placement(bins, rows)
