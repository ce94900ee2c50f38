"""Refinement by compiled loops: :class:`trainer.batching.refine.Refiner` on arrays, step for step the same."""

from __future__ import annotations

from math import inf

import numpy as np

from trainer.batching.cost import Floats, Ints
from trainer.batching.fast import refine as loops
from trainer.batching.packing import deal
from trainer.batching.refine import TINY


class CompiledRefiner:
    """See :class:`trainer.batching.refine.Refiner`, whose results these are to the last bit.

    Units of bin b are ``held[b, first:ends[b] - 1]``, light to heavy, between the same guards.
    """

    def __init__(
        self,
        bins: Ints,
        cost: Floats,
        tokens: Ints,
        buckets: Ints,
        budgets: Ints,
        rows: int,
        enough: float,
        *,
        work: int,
        fills: bool,
        moves: bool,
    ) -> None:
        self.ranks, self.rows, self.budgets = int(budgets.size), rows, budgets
        count, units = self.ranks * rows, int(cost.size)
        first = 2 if moves else 1
        order = np.lexsort((cost, bins))
        sizes = np.bincount(bins, minlength=count)
        self.ends = sizes + (first + 1)
        width = int(sizes.max()) + first + 4
        self.weights, self.held = np.full((count, width), inf), np.full((count, width), -1)
        self.weights[:, 0] = -inf
        if moves:
            self.weights[:, 1], self.held[:, 1] = 0.0, units
        at = bins[order]
        place = first + np.arange(units) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        self.weights[at, place], self.held[at, place] = cost[order], order
        self.tokens = np.append(tokens, 0)
        self.load = np.bincount(bins, cost, minlength=count).astype(np.float64)
        self.room = np.tile(budgets, rows)
        if fills:
            self.room -= np.rint(np.bincount(bins, tokens, minlength=count)).astype(np.int64)
        by_cost = tokens[np.argsort(cost, kind="stable")]
        rising = fills and bool((by_cost[1:] >= by_cost[:-1]).all())
        mixed = bool(buckets.size) and int(buckets.min()) != int(buckets.max())
        self.buckets = buckets
        self.rules = np.array([first, fills, rising, mixed], np.int64)
        even = float(np.cumsum(self.load)[-1]) / self.ranks  # from left to right, as Python's sum rounds
        self.goal, self.tiny = enough - even, TINY * even
        self._work = np.array([work], np.int64)

    @property
    def work(self) -> int:
        """Units that may still be looked at."""
        return int(self._work[0])

    def bins(self) -> Ints:
        """Bin of each unit."""
        first = int(self.rules[0])
        place = np.arange(self.held.shape[1])
        bin_, at = np.nonzero((place >= first) & (place < self.ends[:, None] - 1))
        out = np.empty(self.tokens.size - 1, np.int64)
        out[self.held[bin_, at]] = bin_
        return out

    def path(self) -> float:
        """The critical path: the heaviest bin of each row, summed."""
        return float(np.cumsum(self.load.reshape(self.rows, self.ranks).max(1))[-1])

    def alike(self) -> None:
        """See :meth:`trainer.batching.refine.Refiner.alike`."""
        if self.rows == 1:
            return
        order = np.argsort(deal(self.load, self.budgets), kind="stable")
        self.weights, self.held, self.ends = self.weights[order], self.held[order], self.ends[order]
        self.load, self.room = self.load[order], self.room[order]

    def level(self, passes: int) -> None:
        """See :meth:`trainer.batching.refine.Refiner.level`."""
        state = self.weights, self.held, self.ends, self.load, self.room, self.tokens, self.buckets, self.rules
        self.weights, self.held = loops.level(*state, self._work, self.ranks, self.tiny, passes)

    def run(self) -> None:
        """See :meth:`trainer.batching.refine.Refiner.run`."""
        state = self.weights, self.held, self.ends, self.load, self.room, self.tokens, self.buckets, self.rules
        self.weights, self.held = loops.run(*state, self._work, self.ranks, self.tiny, self.goal)
