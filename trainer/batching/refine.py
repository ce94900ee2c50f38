"""Refinement: swaps and moves between micro-batches that shorten the critical path, under the same
hard caps.

Plain lists and bisection: micro-batches hold few units, where one numpy call costs more than a
whole search here. Deterministic: the work is bounded by counts, never by the clock.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import pairwise
from math import inf

import numpy as np

from trainer.batching.cost import Floats, Ints
from trainer.batching.packing import deal

NEAR = 0.05
"""A swap that misses the wanted gain by no more than this share of it is taken at once."""
GOOD = 0.5
"""A swap that wins this share of what the best partner could allow is taken without asking the next
partner.
"""
FAR = 2
"""Bins of other rows that are asked to take load, in multiples of the ranks."""
LOOK = 8
"""Units that are looked at for one that the caps allow, on either side of the best weight."""
TINY = 2e-7
"""Share of the even load below which a gain isn't worth a swap."""

Swap = tuple[float, int, int]
"""What a swap wins, and the places of both units in their bins."""


def total(values: Iterable[float]) -> float:
    """Sum from left to right, as compiled loops add: ``sum`` carries what is rounded off since
    Python 3.12.
    """
    out = 0.0
    for value in values:
        out += value
    return out


class Refiner:
    """Bins of units with their loads, arranged in rows of ``ranks`` bins; a row costs what its
    heaviest bin costs.

    Bins are numbered ``row * ranks + rank``. ``fills``: caps limit the sum of a bin's tokens; else
    each unit by itself. ``moves``: units may change bins alone; else they only change places, which
    keeps counts as they are. Stops when ``work`` units were looked at, or the critical path is at
    most ``enough``.
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
        fills: bool = True,
        moves: bool = True,
    ) -> None:
        self.ranks, self.rows, self.budgets = int(budgets.size), rows, budgets
        self.units, self.work = int(cost.size), work
        count = self.ranks * rows
        order = np.lexsort((cost, bins))
        weights, units = cost[order].tolist(), order.tolist()
        ends = [0, *np.bincount(bins, minlength=count).cumsum().tolist()]
        # Each bin, light to heavy, between guards that stop every search; where units may move
        # alone, nothing (a unit that weighs 0 and never leaves) stands first: moving is swapping
        # with nothing.
        low, none = ([-inf, 0.0], [-1, self.units]) if moves else ([-inf], [-1])
        self.first = len(low)
        self.weights = [[*low, *weights[a:b], inf] for a, b in pairwise(ends)]
        self.held = [[*none, *units[a:b], -1] for a, b in pairwise(ends)]
        self.tokens: list[int] = [*tokens.tolist(), 0]
        self.load: list[float] = np.bincount(bins, cost, minlength=count).tolist()
        room = np.tile(budgets, rows)
        if fills:
            room = room - np.rint(np.bincount(bins, tokens, minlength=count)).astype(np.int64)
        self.room: list[int] = room.tolist()
        self.fills = int(fills)
        by_cost = np.argsort(cost, kind="stable")
        # A lighter unit is a smaller one: then what is too large for a bin is found by bisection,
        # too.
        self.sorted = bool(fills) and bool((tokens[by_cost][1:] >= tokens[by_cost][:-1]).all())
        mixed = bool(buckets.size) and int(buckets.min()) != int(buckets.max())
        self.buckets: list[int] | None = buckets.tolist() if mixed else None
        even = total(self.load) / self.ranks
        self.goal, self.tiny = enough - even, TINY * even
        self.waits: list[int] = []

    def bins(self) -> Ints:
        """Bin of each unit."""
        out = np.empty(self.units, np.int64)
        sizes = [len(held) - self.first - 1 for held in self.held]
        out[[u for held in self.held for u in held[self.first : -1]]] = np.repeat(
            np.arange(len(sizes)), sizes
        )
        return out

    def path(self) -> float:
        """The critical path: the heaviest bin of each row, summed."""
        return total(
            max(self.load[at : at + self.ranks]) for at in range(0, len(self.load), self.ranks)
        )

    def alike(self) -> None:
        """Change the places of whole bins so that those of like weight share a row, which never
        lengthens the path.
        """
        if self.rows == 1:
            return
        new = deal(np.array(self.load), self.budgets).tolist()
        order = sorted(range(len(new)), key=new.__getitem__)
        self.weights, self.held = [self.weights[b] for b in order], [self.held[b] for b in order]
        self.load, self.room = [self.load[b] for b in order], [self.room[b] for b in order]

    def level(self, passes: int) -> None:
        """Swap between the i-th heaviest and the i-th lightest bin of each row, then with the next
        in turn.
        """
        load, ranks, half = self.load, self.ranks, self.ranks // 2
        idle = 0
        for turn in range(passes):
            swaps = 0
            for first in range(0, len(load), ranks):
                mine = load[first : first + ranks]
                enough = total(mine) / ranks + self.tiny
                if max(mine) <= enough or self.work <= 0:
                    continue
                order = sorted(range(first, first + ranks), key=load.__getitem__)
                for i in range(half):
                    heavy, light = order[-1 - i], order[(i + turn) % half]
                    if load[heavy] <= enough:
                        break
                    apart = (load[heavy] - load[light]) / 2
                    swap = self._search(heavy, light, apart, apart, self.tiny)
                    if swap is not None:
                        self._swap(heavy, light, swap)
                        swaps += 1
            idle = 0 if swaps else idle + 1
            if idle == min(half, 3):
                return

    def run(self) -> None:
        """Exchange while it helps, always for the row that waits most: inside it first, then with
        other rows.
        """
        ranks, load = self.ranks, self.load
        pace = [max(load[at : at + ranks]) for at in range(0, len(load), ranks)]
        even = [total(load[at : at + ranks]) / ranks for at in range(0, len(load), ranks)]
        urge = [
            p - e for p, e in zip(pace, even, strict=True)
        ]  # what levelling a row can win; 0 when nothing helps
        inside = [True] * self.rows
        spare, stale = total(urge), self.rows
        while self.work > 0:
            worst = max(urge)
            if spare <= self.goal or worst <= self.tiny:
                return
            row = urge.index(worst)
            at = row * ranks
            heavy = load.index(pace[row], at, at + ranks)
            if inside[row]:
                other = self._inside(heavy, at)
            else:
                if stale > self.rows // 8:
                    self._look(pace)
                    stale = 0
                other = self._across(heavy, row, pace)
            if other < 0:
                if inside[row] and self.rows > 1:
                    inside[row] = False
                else:
                    urge[row] = 0.0
                continue
            stale += 1
            for changed in (row,) if other // ranks == row else (row, other // ranks):
                at = changed * ranks
                mine = load[at : at + ranks]
                before = pace[changed] - even[changed]
                pace[changed], even[changed] = max(mine), total(mine) / ranks
                urge[changed] = pace[changed] - even[changed]
                spare += urge[changed] - before
                inside[changed] = True

    def _inside(self, heavy: int, first: int) -> int:
        """Level ``heavy`` with a lighter bin of its row as far as one swap can; that bin, or -1."""
        load = self.load
        top = load[heavy]
        best, found, partner = self.tiny, None, -1
        order = sorted(range(first, first + self.ranks), key=load.__getitem__)
        good = GOOD * (top - load[order[0]]) / 2
        for light in order:
            half = (top - load[light]) / 2
            if half <= best or best >= good:
                break
            swap = self._search(heavy, light, half, half, best)
            if swap is not None:
                best, found, partner = swap[0], swap, light
        if found is not None:
            self._swap(heavy, partner, found)
        return partner

    def _look(self, pace: list[float]) -> None:
        """Note which bins wait longest for their row."""
        wait = np.array(self.load).reshape(self.rows, self.ranks) - np.array(pace)[:, None]
        self.waits = wait.reshape(-1).argsort(kind="stable")[: FAR * self.ranks].tolist()
        self.work -= wait.size // 16

    def _across(self, heavy: int, row: int, pace: list[float]) -> int:
        """Move load from ``heavy`` to where another row waits anyway; the bin that takes it, or
        -1.
        """
        load, ranks = self.load, self.ranks
        first, last = row * ranks, (row + 1) * ranks
        need = load[heavy] - sorted(load[first:last])[-2] if ranks > 1 else load[heavy]
        best, found, partner = self.tiny, None, -1
        for light in self.waits:
            spare = pace[light // ranks] - load[light]
            least = min(need, spare)
            if first <= light < last or least <= best:
                continue
            swap = self._search(heavy, light, least, max(need, spare), best)
            if swap is not None:
                best, found, partner = swap[0], swap, light
                if best >= (1.0 - NEAR) * need:
                    break
        if found is not None:
            self._swap(heavy, partner, found)
        return partner

    def _search(self, heavy: int, light: int, low: float, high: float, least: float) -> Swap | None:
        """The swap whose gain (what ``heavy`` loses and ``light`` gets) comes nearest to ``low`` ..
        ``high``.

        It wins ``low`` less what it misses. None when no allowed swap wins more than ``least``.
        """
        own, theirs = self.held[heavy], self.held[light]
        first = self.first
        if (
            self.buckets is not None
            and len(theirs) > first + 1
            and self.buckets[own[-2]] != self.buckets[theirs[-2]]
        ):
            return None  # all units of a bin are of one bucket; an empty bin takes any
        mine, their, tokens, fills = (
            self.weights[heavy],
            self.weights[light],
            self.tokens,
            self.fills,
        )
        room, room_heavy = self.room[light], self.room[heavy]
        miss, near = low - least, NEAR * low
        place: tuple[int, int] | None = None
        a = len(mine) - 1
        while a > first:
            a -= 1
            weight, size = mine[a], tokens[own[a]]
            up, down = weight - low, weight - high
            if up <= -miss:
                break  # alone too light, and so is what follows
            start = b = bisect_left(their, down)
            while their[b] - up < miss:
                other = tokens[theirs[b]]
                if size - fills * other <= room and other - fills * size <= room_heavy:
                    miss, place = max(0.0, their[b] - up), (a, b)
                    break
                b += 1
                if b == start + LOOK:
                    if not self.sorted:
                        break
                    b = bisect_left(theirs, size - room, b, len(theirs) - 1, key=tokens.__getitem__)
            b = start - 1
            while down - their[b] < miss and b >= start - LOOK:
                other = tokens[theirs[b]]
                if size - fills * other <= room and other - fills * size <= room_heavy:
                    miss, place = down - their[b], (a, b)
                    break
                b -= 1
            if miss <= near:
                break
        self.work -= len(mine) - a + 1
        return None if place is None else (low - miss, *place)

    def _swap(self, heavy: int, light: int, swap: Swap) -> None:
        """Exchange the units at the places found; nothing stays where it is."""
        _, a, b = swap
        weight, unit = self.weights[heavy].pop(a), self.held[heavy].pop(a)
        other, partner = self.weights[light][b], self.held[light][b]
        if partner < self.units:
            del self.weights[light][b], self.held[light][b]
            self._put(heavy, other, partner)
        self._put(light, weight, unit)
        self.load[heavy] -= weight - other
        self.load[light] += weight - other
        if self.fills:
            grow = self.tokens[unit] - self.tokens[partner]
            self.room[heavy] += grow
            self.room[light] -= grow

    def _put(self, bin_: int, weight: float, unit: int) -> None:
        at = max(self.first, bisect_left(self.weights[bin_], weight))
        self.weights[bin_].insert(at, weight)
        self.held[bin_].insert(at, unit)
