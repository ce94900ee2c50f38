"""Refinement: swaps and moves between micro-batches that shorten the critical path, under the same hard caps.

Deterministic: the work is bounded by counts, never by the clock.
"""

from __future__ import annotations

import numpy as np

from trainer.batching.cost import Floats, Ints

FEW, MANY = 192, 2048
"""Pairs of units weighed at once: first a few against the lightest bins, then many."""


class Refiner:
    """Bins of units with their loads, arranged in rows of ``ranks`` bins; a row costs what its heaviest bin costs.

    Bins are numbered ``row * ranks + rank``. ``fills``: caps limit the sum of a bin's tokens; else each unit by itself.
    ``moves``: units may change bins alone; else they only change places, which keeps counts as they are.
    """

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
        self.units = int(cost.size)
        self.cost = np.append(cost, np.zeros(empty))
        self.tokens = np.append(tokens, np.zeros(empty, np.int64))
        self.bins = np.append(bins, np.arange(empty))
        self.load = np.bincount(bins, cost, minlength=count).astype(np.float64)
        self.cap = np.tile(budgets, rows)
        self.room = self.cap - np.rint(np.bincount(bins, tokens, minlength=count)).astype(np.int64)
        self.mixed = bool(buckets.size) and int(buckets.min()) != int(buckets.max())
        self.unit_bucket = buckets
        self.bucket = np.full(count, -1, np.int64)
        self.bucket[bins] = buckets
        self.held: list[list[int]] = [[] for _ in range(count)]
        for u, b in enumerate(bins.tolist()):
            self.held[b].append(u)
        self.moves = moves

    def run(self, tries: int, goal: float) -> None:
        """At most ``tries`` attempts at an exchange, until the path is within ``goal`` of the perfect split."""
        grid = self.load.reshape(self.rows, self.ranks)
        mean = float(self.load.sum()) / self.ranks
        pace, even = grid.max(1), grid.sum(1) / self.ranks
        stuck = [0] * self.rows  # 0, 1: try inside the row; 2: try other rows; 3: nothing helps
        last = 3 if self.rows > 1 else 2
        free = np.ones(self.rows)
        for _ in range(tries):
            excess = (pace - even) * free
            row = int(excess.argmax())
            if float(excess.sum()) <= goal * mean or excess[row] <= 0.02 * goal * mean:
                return
            heavy = row * self.ranks + int(grid[row].argmax())
            if stuck[row] < 2:
                other = self._inside(heavy, row, MANY if stuck[row] else FEW)
            else:
                other = self._across(heavy, row, pace)
            if other < 0:
                stuck[row] += 1
                free[row] = stuck[row] < last
                continue
            for changed in {row, other // self.ranks}:
                pace[changed], even[changed] = grid[changed].max(), grid[changed].sum() / self.ranks
                stuck[changed], free[changed] = 0, 1.0

    def _inside(self, heavy: int, row: int, block: int) -> int:
        """Level ``heavy`` with a lighter bin of its row as far as one swap can; that bin, or -1."""
        first = row * self.ranks
        order = (first + self.load[first : first + self.ranks].argsort(kind="stable")).tolist()
        pairs = self._pairs(heavy, order, block)
        if pairs is None:
            return -1
        i, j, bins, gain = pairs
        top = float(self.load[heavy])
        score: Floats = np.maximum(-gain, gain - (top - self.load[bins]))
        return self._take(i, j, bins, gain, score, heavy, top)

    def _across(self, heavy: int, row: int, pace: Floats) -> int:
        """Move load from ``heavy`` to where another row waits anyway; the bin that takes it, or -1."""
        first = row * self.ranks
        mates = self.load[first : first + self.ranks]
        top = float(self.load[heavy])
        floor = float(np.partition(mates, -2)[-2] - top) if self.ranks > 1 else -top
        wait = (self.load.reshape(self.rows, self.ranks) - pace[:, None]).reshape(-1)
        order = wait.argsort(kind="stable")[: MANY // 8]
        pairs = self._pairs(heavy, order[order // self.ranks != row].tolist(), MANY)
        if pairs is None:
            return -1
        i, j, bins, gain = pairs
        score: Floats = np.maximum(floor, -gain) + np.maximum(0.0, gain + wait[bins])
        return self._take(i, j, bins, gain, score, heavy, top)

    def _pairs(self, heavy: int, partners: list[int], block: int) -> tuple[Ints, Ints, Ints, Floats] | None:
        """Units of ``heavy`` [i], units of partners [j], the bins of these, the cost that each swap moves [i, j]."""
        mine = self.held[heavy]
        if not mine:
            return None
        theirs: list[int] = []
        most = block // len(mine)
        wanted = int(self.bucket[heavy]) if self.mixed else 0
        for b in partners:
            if b == heavy or (self.mixed and self.bucket[b] not in (-1, wanted)):
                continue
            theirs += self.held[b]
            if self.moves:
                theirs.append(self.units + b)
            if len(theirs) >= most:
                break
        if not theirs:
            return None
        i, j = np.array(mine), np.array(theirs)
        return i, j, self.bins[j], self.cost[i][:, None] - self.cost[j]

    def _take(self, i: Ints, j: Ints, bins: Ints, gain: Floats, score: Floats, heavy: int, top: float) -> int:
        """Make the allowed swap of the lowest score, when that is below 0; the partner's bin, or -1."""
        size_i, size_j = self.tokens[i][:, None], self.tokens[j]
        allowed = gain > 0
        if self.fills:
            grow = size_i - size_j
            allowed &= grow <= self.room[bins]
            allowed &= grow >= -self.room[heavy]
        else:
            allowed &= (size_i <= self.cap[bins]) & (size_j <= self.cap[heavy])
        score[~allowed] = np.inf
        best = int(score.argmin())
        a, b = divmod(best, j.size)
        if not score[a, b] < -1e-9 * top:
            return -1
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
            if not self.held[a]:
                self.bucket[a] = -1
