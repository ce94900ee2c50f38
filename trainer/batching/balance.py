"""Equal work with equal counts: which rank starts with which samples (A9)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from trainer.batching.cost import Ints
from trainer.batching.search import GOAL, improve


def balance_ranks(costs: ArrayLike, ranks: int) -> list[Ints]:
    """Samples of each rank: numbers of samples within 1 of each other, work as equal as swaps make
    it.

    ``costs`` [samples], in any unit (their lengths, say). Indices come in rising order.
    """
    cost = np.array(costs, np.float64, order="C").reshape(-1)
    order = np.argsort(-cost, kind="stable")
    bins = np.empty(cost.size, np.int64)
    load = np.zeros(ranks)
    for first in range(0, cost.size, ranks):
        block = order[first : first + ranks]
        lightest = np.argsort(load, kind="stable")[: block.size]
        bins[block] = lightest
        load[lightest] += cost[block]
    if cost.size and ranks > 1:
        nothing = np.zeros(cost.size, np.int64)
        enough = (1.0 + GOAL / 10) * float(cost.sum()) / ranks
        bins = improve(
            bins, cost, nothing, nothing, np.ones(ranks, np.int64), 1, enough, moves=False
        )
    return [np.flatnonzero(bins == r) for r in range(ranks)]
