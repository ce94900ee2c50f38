"""Sums over bins. Every sum runs from left to right, so that compiled code rounds as Python does.

Bins are numbered row by row: bin ``row * ranks + rank`` is micro-batch ``row`` of that rank.
"""

from __future__ import annotations

from trainer.batching.loops.primitives import FloatList, IntList, floats, integers


def total(values: FloatList, first: int, last: int) -> float:
    """Sum of ``values[first:last]``; ``sum`` would carry rounding errors since Python 3.12."""
    out = 0.0
    for i in range(first, last):
        out += values[i]
    return out


def argmax(values: FloatList, first: int, last: int) -> int:
    """Index of the first of the largest values of ``values[first:last]``."""
    best = first
    for i in range(first + 1, last):
        if values[i] > values[best]:
            best = i
    return best


def bin_loads(bins: IntList, cost: FloatList, count: int) -> FloatList:
    """Cost of each of ``count`` bins [bins]; ``bins`` and ``cost`` are [pieces]."""
    out = floats(count)
    for i in range(len(bins)):
        out[bins[i]] += cost[i]
    return out


def shared_sums(
    bins: IntList,
    own: FloatList,
    prompts: FloatList,
    groups: IntList,
    by_group: IntList,
    count: int,
) -> FloatList:
    """Sum over each of ``count`` bins where a group's prompt counts once per bin, float64 [bins].

    All lists are [sequences]: ``own`` is what a sequence adds, ``prompts`` what its prompt adds,
    ``by_group`` the indices of the sequences, group by group.
    """
    out = bin_loads(bins, own, count)
    extra = floats(count)
    last_group = integers(count)
    for b in range(count):
        last_group[b] = -1
    for i in by_group:
        if last_group[bins[i]] != groups[i]:
            last_group[bins[i]] = groups[i]
            extra[bins[i]] += prompts[i]
    for b in range(count):
        out[b] += extra[b]
    return out


def path_of_loads(load: FloatList, ranks: int) -> float:
    """Critical path of bins: the heaviest bin of each row of ``ranks`` bins, summed."""
    out = 0.0
    for first in range(0, len(load), ranks):
        out += load[argmax(load, first, first + ranks)]
    return out


def path(bins: IntList, cost: FloatList, rows: int, ranks: int) -> float:
    """Critical path of pieces in bins; ``bins`` and ``cost`` are [pieces]."""
    return path_of_loads(bin_loads(bins, cost, rows * ranks), ranks)
