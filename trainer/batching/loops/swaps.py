"""The search for the swap of two pieces that levels two bins best."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from trainer.batching.loops.bins import FIRST, Bins
from trainer.batching.loops.primitives import IntList

NEAR = 0.05
"""A swap that misses the wanted gain by no more than this share of it is taken at once."""
LOOK = 8
"""Pieces that are looked at for one that the caps allow, on either side of the best cost."""


class Rules(NamedTuple):
    """What a swap must keep, and what is left to spend on searches."""

    tokens: IntList
    """Tokens of each piece, then 0 for nothing [pieces + 1]."""
    buckets: IntList
    """Bucket of each piece [pieces]."""
    fills: bool
    """Whether caps limit the sum of a bin's tokens; else each piece by itself."""
    rising: bool
    """Whether a lighter piece is never a larger one, so that sizes are found by bisection."""
    mixed: bool
    """Whether pieces are of more than one bucket; those of a bin are always of one."""
    work: IntList
    """Pieces that may still be looked at [1]."""


def find_swap(
    bins: Bins, rules: Rules, heavy: int, light: int, low: float, high: float, least: float
) -> tuple[float, int, int]:
    """The swap whose transfer (what ``heavy`` loses and ``light`` gets) comes nearest to the range
    ``low`` .. ``high``.

    Returns its gain, which is ``low`` less what it misses, and the places of both pieces; places
    are -1 when no allowed swap gains more than ``least``.
    """
    if rules.mixed and not _one_bucket(bins, rules, heavy, light):
        return 0.0, -1, -1
    cost = bins.cost
    width = len(cost) // len(bins.load)
    light_start = light * width
    light_end = light_start + bins.ends[light]
    heavy_first = heavy * width + FIRST
    heavy_end = heavy * width + bins.ends[heavy]
    miss = low - least
    near = NEAR * low
    place = -1
    partner = -1
    a = heavy_end - 1
    while a > heavy_first:
        a -= 1
        up = cost[a] - low
        down = cost[a] - high
        if up <= -miss:
            break  # alone too light, and so is what follows
        size = rules.tokens[bins.pieces[a]]
        start = bisect_left(cost, down, light_start, light_end)
        b = _partner_above(bins, rules, heavy, light, size, start, up, miss)
        if b >= 0:
            miss = max(0.0, cost[b] - up)
            place = a
            partner = b
        b = _partner_below(bins, rules, heavy, light, size, start, down, miss)
        if b >= 0:
            miss = down - cost[b]
            place = a
            partner = b
        if miss <= near:
            break
    rules.work[0] -= heavy_end - a + 1
    return low - miss, place, partner


def _one_bucket(bins: Bins, rules: Rules, heavy: int, light: int) -> bool:
    """Whether the pieces of both bins are of one bucket; an empty bin takes any."""
    if bins.ends[light] == FIRST + 1:
        return True
    width = len(bins.pieces) // len(bins.load)
    last = bins.pieces[heavy * width + bins.ends[heavy] - 2]
    light_last = bins.pieces[light * width + bins.ends[light] - 2]
    return rules.buckets[last] == rules.buckets[light_last]


def _partner_above(
    bins: Bins, rules: Rules, heavy: int, light: int, size: int, start: int, up: float, miss: float
) -> int:
    """The lightest allowed partner from place ``start`` on that misses less than ``miss``, or -1.

    ``size`` are the tokens of the heavy bin's piece.
    """
    end = light * (len(bins.cost) // len(bins.load)) + bins.ends[light]
    b = start
    while bins.cost[b] - up < miss:
        if _fits(bins, rules, heavy, light, size, b):
            return b
        b += 1
        if b == start + LOOK:
            if not rules.rising:
                return -1
            b = _first_of_size(bins, rules, size - bins.room[light], b, end - 1)
    return -1


def _partner_below(
    bins: Bins,
    rules: Rules,
    heavy: int,
    light: int,
    size: int,
    start: int,
    down: float,
    miss: float,
) -> int:
    """The heaviest allowed partner before place ``start`` that misses less than ``miss``, or -1."""
    b = start - 1
    while down - bins.cost[b] < miss and b >= start - LOOK:
        if _fits(bins, rules, heavy, light, size, b):
            return b
        b -= 1
    return -1


def _fits(bins: Bins, rules: Rules, heavy: int, light: int, size: int, b: int) -> bool:
    """Whether caps allow to swap a piece of ``size`` tokens with that at place ``b``."""
    other = rules.tokens[bins.pieces[b]]
    if rules.fills:
        return size - other <= bins.room[light] and other - size <= bins.room[heavy]
    return size <= bins.room[light] and other <= bins.room[heavy]


def _first_of_size(bins: Bins, rules: Rules, least: int, first: int, last: int) -> int:
    """The first place in ``first`` .. ``last`` with at least so many tokens, which rise."""
    while first < last:
        middle = (first + last) // 2
        if rules.tokens[bins.pieces[middle]] < least:
            first = middle + 1
        else:
            last = middle
    return first
