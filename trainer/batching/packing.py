"""Pieces into bins under hard caps. Everything here is greedy; refinement comes after.

Bins are numbered row by row: bin ``k * ranks + r`` is micro-batch k of rank r.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trainer.batching.cost import Floats, Ints
from trainer.batching.loops import accelerated, best_fit, multifit, rows, sums
from trainer.batching.loops import lightest_fit as lightest


class ByCost(NamedTuple):
    """Pieces by rising cost: what :func:`fill_rows` and swaps begin with. Arrays are [pieces]."""

    order: Ints
    cost: Floats
    tokens: Ints
    rising: bool
    """Whether a lighter piece is never a larger one."""
    total: float
    """Cost of all."""

    @classmethod
    def of(cls, cost: Floats, tokens: Ints) -> ByCost:
        """Sort pieces of this cost [pieces] and size [pieces]."""
        order = np.argsort(cost, kind="stable")
        sizes = tokens[order]
        rising = bool((sizes[1:] >= sizes[:-1]).all())
        return cls(order, cost[order], sizes, rising, float(cost.sum()))


def open_bins(tokens: Ints, cap: int) -> Ints:
    """Bin of each piece [pieces] by best-fit decreasing, opening bins of ``cap`` tokens as needed.

    Bins count from 0.
    """
    bins = fit_best(tokens, np.full(tokens.size, cap))
    if bins is None:
        raise AssertionError("a piece is larger than the cap")
    return bins


def fit_best(tokens: Ints, caps: Ints) -> Ints | None:
    """Bin of each piece [pieces] by best-fit decreasing over bins of ``caps`` tokens [bins].

    None when a piece finds no room.
    """
    order = np.argsort(-tokens, kind="stable")
    loop = accelerated(best_fit.best_fit, int(tokens.size))
    return _in_place(order, loop(tokens[order], caps, 1.0))


def open_bins_of_ranks(
    tokens: Ints, ranks: Ints, buckets: Ints, budgets: Ints
) -> tuple[Ints, Ints]:
    """Like :func:`open_bins` for every rank and bucket by itself; bins are numbered rank by rank.

    ``tokens``, ``ranks`` and ``buckets`` are [pieces], ``budgets`` [ranks]. Returns the bin of each
    piece [pieces] and the number of bins of each rank [ranks], at least one (a rank without pieces
    runs a filler).
    """
    order = np.lexsort((-tokens, buckets, ranks))
    rank = ranks[order]
    loop = accelerated(best_fit.open_bins, int(tokens.size))
    inside, counts = loop(rank, buckets[order], tokens[order], budgets)
    counts = np.maximum(1, counts)
    out = np.empty(tokens.size, np.int64)
    out[order] = (np.cumsum(counts) - counts)[rank] + inside
    return out, counts


def fit_lightest(cost: Floats, tokens: Ints, caps: Ints, *, fills: bool = True) -> Ints | None:
    """Bin of each piece [pieces], heaviest first, into the lightest bin with room.

    None when a piece finds no room. ``fills=False``: a cap [bins] limits each piece by itself
    instead of their sum (a rank with many micro-batches).
    """
    order = np.argsort(-cost, kind="stable")
    loop = accelerated(lightest.lightest_fit, int(tokens.size))
    return _in_place(order, loop(cost[order], tokens[order], caps, fills))


def fill_rows(by_cost: ByCost, budgets: Ints, num_rows: int) -> Ints | None:
    """Bin of each piece [pieces] over ``num_rows`` micro-batches of every rank.

    The heaviest pieces set the pace of their rows, the rest is spread evenly. None when the greedy
    finds no room.
    """
    loop = accelerated(rows.fill_rows, int(by_cost.order.size))
    bins: Ints = loop(
        by_cost.cost,
        by_cost.tokens,
        by_cost.order,
        budgets,
        num_rows,
        by_cost.rising,
        by_cost.total,
    )
    return bins if bins[0] >= 0 else None


def path(bins: Ints, cost: Floats, num_rows: int, ranks: int) -> float:
    """Critical path of pieces in bins; ``bins`` and ``cost`` are [pieces]."""
    length: float = accelerated(sums.path, int(cost.size))(bins, cost, num_rows, ranks)
    return length


def deal(load: Floats, budgets: Ints) -> Ints:
    """New number of each bin [bins]: among ranks of one budget the heaviest bins share a row."""
    new: Ints = accelerated(multifit.deal, int(load.size))(load, budgets)
    return new


def _in_place(order: Ints, bins: Ints) -> Ints | None:
    """The bins of the pieces ``order``, in the pieces' own order; None when the first is -1."""
    if bins[0] < 0:
        return None
    out = np.empty(order.size, np.int64)
    out[order] = bins
    return out
