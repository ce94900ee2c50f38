"""Refinement: swaps and moves between micro-batches that shorten the critical path, under the same hard caps.

Deterministic: the work is bounded by counts, never by the clock.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trainer.batching.cost import Floats, Ints

BLOCK = 4096
"""Pairs of units weighed at once."""


class Refiner:
    """Bins of units with their loads, arranged in rows of ``ranks`` bins; a row costs what its heaviest bin costs."""

    def __init__(
        self,
        bins: Ints,
        cost: Floats,
        tokens: Ints,
        buckets: Ints,
        budgets: Ints,
        rows: int,
        *,
        fills: bool = True,
        moves: bool = True,
    ) -> None:
        self.ranks, self.rows, self.fills = int(budgets.size), rows, fills
        count = self.ranks * rows
        # One empty unit per bin, so that moving a unit is swapping it with nothing.
        empty = count if moves else 0
        self.cost = np.append(cost, np.zeros(empty))
        self.tokens = np.append(tokens, np.zeros(empty, np.int64))
        self.bins = np.append(bins, np.arange(empty))
        self.units = int(cost.size)
        self.load = np.bincount(bins, cost, minlength=count)
        self.cap = np.tile(budgets, rows)
        self.room = self.cap - np.bincount(bins, tokens, minlength=count).astype(np.int64)
        self.bucket = np.full(count, -1, np.int64)
        self.bucket[bins] = buckets
        self.unit_bucket = buckets
        self.mixed = bool(buckets.size) and int(buckets.min()) != int(buckets.max())
        order = np.argsort(self.bins, kind="stable")
        ends = np.cumsum(np.bincount(self.bins, minlength=count))
        self.held: list[list[int]] = [part.tolist() for part in np.split(order, ends[:-1])]

    @property
    def path(self) -> float:
        """Sum over rows of the heaviest bin."""
        return float(self.load.reshape(self.rows, self.ranks).max(1).sum())

    def run(self, tries: int, goal: float) -> None:
        """At most ``tries`` exchanges, until the critical path is within ``goal`` of the perfect split."""
        mean = float(self.load.sum()) / self.ranks
        stuck = np.zeros(self.rows, np.int64)  # 0: try inside the row, 1: try other rows, 2: nothing helps
        for _ in range(tries):
            grid = self.load.reshape(self.rows, self.ranks)
            excess = grid.max(1) - grid.mean(1)
            if float(excess.sum()) <= goal * mean:
                return
            excess[stuck == 2] = 0.0
            row = int(excess.argmax())
            if excess[row] <= 0.02 * goal * mean:
                return
            heavy = row * self.ranks + int(grid[row].argmax())
            other = self._exchange(heavy, row, inside=stuck[row] == 0)
            if other < 0:
                stuck[row] += 1
            else:
                stuck[row] = stuck[other // self.ranks] = 0

    def _partners(self, heavy: int, row: int, inside: bool) -> Iterator[int]:
        """Bins that may take load off ``heavy``, those with most slack below the pace of their row first."""
        if inside:
            first = row * self.ranks
            order = first + np.argsort(self.load[first : first + self.ranks], kind="stable")
        else:
            pace = self.load.reshape(self.rows, self.ranks).max(1)
            order = np.argsort(self.load - np.repeat(pace, self.ranks), kind="stable")
        wanted = self.bucket[heavy]
        for b in order.tolist():
            if b != heavy and (inside or b // self.ranks != row):
                if self.mixed and self.bucket[b] not in (-1, wanted):
                    continue
                yield b

    def _exchange(self, heavy: int, row: int, *, inside: bool) -> int:
        """Make the best swap of a unit of ``heavy`` with a unit (or nothing) of another bin; that bin, or -1."""
        mine = [u for u in self.held[heavy] if u < self.units]
        theirs: list[int] = []
        for b in self._partners(heavy, row, inside):
            theirs += self.held[b]
            if len(theirs) * len(mine) > BLOCK:
                break
        if not theirs or not mine:
            return -1
        i, j = np.array(mine), np.array(theirs)
        bins = self.bins[j]
        gain = self.cost[i][:, None] - self.cost[j]
        size_i, size_j = self.tokens[i][:, None], self.tokens[j]
        if self.fills:
            grow = size_i - size_j
            allowed = (gain > 0) & (grow <= self.room[bins]) & (-grow <= self.room[heavy])
        else:
            allowed = (gain > 0) & (size_i <= self.cap[bins]) & (size_j <= self.cap[heavy])
        top = float(self.load[heavy])
        after = self.load[bins] + gain
        if inside:
            score = np.maximum(top - gain, after) - top
        else:
            first = row * self.ranks
            others = np.delete(self.load[first : first + self.ranks], heavy - first)
            second = float(others.max()) if others.size else 0.0
            pace = self.load.reshape(self.rows, self.ranks).max(1)[bins // self.ranks]
            score = np.maximum(second, top - gain) - top + np.maximum(0.0, after - pace)
        score[~allowed] = np.inf
        best = int(score.argmin())
        if not score.flat[best] < -1e-9 * top:
            return -1
        a, b = divmod(best, j.size)
        self._swap(int(i[a]), int(j[b]))
        return int(bins[b])

    def _swap(self, i: int, j: int) -> None:
        """Exchange units i and j between their bins; an empty unit stays where it is."""
        a, b = int(self.bins[i]), int(self.bins[j])
        gain, grow = self.cost[i] - self.cost[j], self.tokens[i] - self.tokens[j]
        self.load[a] -= gain
        self.load[b] += gain
        self.room[a] += grow
        self.room[b] -= grow
        self.bins[i] = b
        self.held[a].remove(i)
        self.held[b].append(i)
        if j < self.units:
            self.bins[j] = a
            self.held[b].remove(j)
            self.held[a].append(j)
        if self.mixed:
            self.bucket[b] = self.unit_bucket[i]
            if len(self.held[a]) == 1:
                self.bucket[a] = -1
