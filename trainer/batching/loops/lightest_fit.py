"""Longest processing time first: each piece goes into the lightest bin that has room for it."""

from __future__ import annotations

from typing import NamedTuple

from trainer.batching.loops.primitives import FloatList, IntList, floats, integers


class Heap(NamedTuple):
    """A binary heap of (key, tie, bin), smallest first, in lists of fixed length."""

    keys: FloatList
    ties: FloatList
    bins: IntList


def lightest_fit(cost: FloatList, sizes: IntList, caps: IntList, fills: bool) -> IntList:
    """Bin of each piece [pieces]; the first is -1 when a piece finds no room.

    Pieces come by falling ``cost``. ``fills``: caps [bins] limit the sum of the ``sizes`` of a bin;
    else each piece by itself. Bins without room wait in a second heap, roomiest first, until a
    piece comes that they hold.
    """
    count = len(caps)
    room = caps.copy()
    ready = Heap(floats(count), floats(count), integers(count))
    full = Heap(floats(count), floats(count), integers(count))
    for b in range(count):
        ready.bins[b] = b
    num_ready = count
    num_full = 0
    out = integers(len(sizes))
    for i in range(len(sizes)):
        while num_full > 0 and -full.keys[0] >= sizes[i]:
            _push(ready, num_ready, full.ties[0], 0.0, full.bins[0])
            num_ready += 1
            num_full -= 1
            _drop_first(full, num_full)
        while num_ready > 0 and room[ready.bins[0]] < sizes[i]:
            b = ready.bins[0]
            _push(full, num_full, -float(room[b]), ready.keys[0], b)
            num_full += 1
            num_ready -= 1
            _drop_first(ready, num_ready)
        if num_ready == 0:
            out[0] = -1
            break
        b = ready.bins[0]
        out[i] = b
        if fills:
            room[b] -= sizes[i]
        ready.keys[0] += cost[i]
        _sift_down(ready, num_ready)
    return out


def _push(heap: Heap, size: int, key: float, tie: float, bin_: int) -> None:
    """Add an entry to a heap of ``size`` entries."""
    heap.keys[size] = key
    heap.ties[size] = tie
    heap.bins[size] = bin_
    at = size
    while at > 0:
        parent = (at - 1) // 2
        if not _precedes(heap, at, parent):
            return
        _exchange(heap, at, parent)
        at = parent


def _drop_first(heap: Heap, size: int) -> None:
    """Remove the first entry; ``size`` entries are left."""
    _exchange(heap, 0, size)
    _sift_down(heap, size)


def _sift_down(heap: Heap, size: int) -> None:
    """Let the first of ``size`` entries sink to its place."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            return
        if child + 1 < size and _precedes(heap, child + 1, child):
            child += 1
        if not _precedes(heap, child, at):
            return
        _exchange(heap, child, at)
        at = child


def _precedes(heap: Heap, a: int, b: int) -> bool:
    if heap.keys[a] != heap.keys[b]:
        return heap.keys[a] < heap.keys[b]
    if heap.ties[a] != heap.ties[b]:
        return heap.ties[a] < heap.ties[b]
    return heap.bins[a] < heap.bins[b]


def _exchange(heap: Heap, a: int, b: int) -> None:
    heap.keys[a], heap.keys[b] = heap.keys[b], heap.keys[a]
    heap.ties[a], heap.ties[b] = heap.ties[b], heap.ties[a]
    heap.bins[a], heap.bins[b] = heap.bins[b], heap.bins[a]
