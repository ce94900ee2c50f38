"""Published algorithms that cut sequences into parts or bins; what the peers are made of."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np


class Node(NamedTuple):
    """A partial partition of the differencing method."""

    sums: np.ndarray
    """Weight of each part, heaviest first [k]."""
    order: np.ndarray
    """A leaf's items, or the parts of the two children that were joined, by falling weight."""
    children: tuple[int, int] | None
    """Numbers of the nodes that were joined; None for a leaf."""


def karmarkar_karp(weight: np.ndarray, k: int, *, equal: bool = False) -> list[np.ndarray]:
    """Largest differencing method (Karmarkar and Karp 1982): indices of the items of each of ``k``
    parts.

    ``weight`` [items]. ``equal`` keeps the counts equal (needs a multiple of k).
    """
    nodes = _leaves(weight, k, equal)
    heap = [(_spread(node), number) for number, node in enumerate(nodes)]
    heapify(heap)
    while len(heap) > 1:
        _, a = heappop(heap)
        _, b = heappop(heap)
        sums = nodes[a].sums + nodes[b].sums[::-1]
        order = np.argsort(-sums, kind="stable")
        joined = Node(sums[order], order, (a, b))
        heappush(heap, (_spread(joined), len(nodes)))
        nodes.append(joined)
    parts = _parts_of_items(nodes, weight.size, k)
    by_part = np.argsort(parts, kind="stable")
    return np.split(by_part, np.cumsum(np.bincount(parts, minlength=k))[:-1])


def _leaves(weight: np.ndarray, k: int, equal: bool) -> list[Node]:
    """One leaf per item, or per k items of like weight where counts are to be equal."""
    order = np.argsort(weight, kind="stable")
    blocks = order.reshape(-1, k)[:, ::-1] if equal else order[:, None]
    leaves = []
    for block in blocks:
        sums = np.zeros(k)
        sums[: block.size] = weight[block]
        leaves.append(Node(sums, block, None))
    return leaves


def _spread(node: Node) -> float:
    """Heap key: the node whose parts differ most comes first."""
    return -(float(node.sums[0]) - float(node.sums[-1]))


def _parts_of_items(nodes: list[Node], count: int, k: int) -> np.ndarray:
    """Part of each item [items], from the last node down to the leaves."""
    out = np.empty(count, np.int64)
    part_of_place = {len(nodes) - 1: np.arange(k)}
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        parts = part_of_place.pop(number)
        if node.children is None:
            out[node.order] = parts[: node.order.size]
            continue
        before = np.empty(k, np.int64)
        before[node.order] = parts
        part_of_place[node.children[0]] = before
        part_of_place[node.children[1]] = before[::-1]
    return out


def first_fit(lengths: np.ndarray, cap: int, order: np.ndarray) -> list[list[int]]:
    """First-fit over ``order``."""
    bins: list[list[int]] = []
    room: np.ndarray = np.zeros(lengths.size + 1, np.int64)
    for i in order.tolist():
        size = int(lengths[i])
        fits = room[: len(bins)] >= size
        b = int(fits.argmax()) if len(bins) else 0
        if not len(bins) or not fits[b]:
            b = len(bins)
            bins.append([])
            room[b] = cap
        bins[b].append(i)
        room[b] -= size
    return bins


def first_fit_decreasing(lengths: np.ndarray, cap: int) -> list[list[int]]:
    return first_fit(lengths, cap, np.argsort(-lengths, kind="stable"))


class OpenBins:
    """Bins of ``cap`` tokens and the sequences in them."""

    def __init__(self, lengths: np.ndarray, cap: int) -> None:
        self.bins: list[list[int]] = []
        self.room: list[int] = []
        self._lengths, self._cap = lengths, cap

    def open(self, i: int) -> None:
        """Put sequence ``i`` into a bin of its own."""
        self.bins.append([])
        self.room.append(self._cap)
        self.put(i, len(self.bins) - 1)

    def put(self, i: int, b: int) -> None:
        """Put sequence ``i`` into bin ``b``."""
        self.bins[b].append(i)
        self.room[b] -= int(self._lengths[i])

    def first_that_holds(self, i: int) -> int | None:
        """The first bin with room for sequence ``i``."""
        for b, room in enumerate(self.room):
            if self._lengths[i] <= room:
                return b
        return None


def modified_first_fit_decreasing(lengths: np.ndarray, cap: int) -> list[list[int]]:
    """Johnson and Garey's five phases (1985), the last one first-fit decreasing over the bins made
    so far.
    """
    order = np.argsort(-lengths, kind="stable").tolist()
    large = [i for i in order if lengths[i] > cap / 2]
    medium = [i for i in order if cap / 3 < lengths[i] <= cap / 2]
    small = [i for i in order if cap / 6 < lengths[i] <= cap / 3]
    tiny = [i for i in order if lengths[i] <= cap / 6]
    packed = OpenBins(lengths, cap)
    for i in large:
        packed.open(i)
    _add_medium(packed, lengths, medium)
    _add_small_pairs(packed, lengths, small)
    for i in sorted(medium + small + tiny, key=lambda i: -lengths[i]):  # phases 4 and 5
        b = packed.first_that_holds(i)
        if b is None:
            packed.open(i)
        else:
            packed.put(i, b)
    return packed.bins


def _add_medium(packed: OpenBins, lengths: np.ndarray, medium: list[int]) -> None:
    """Phase 2: one medium item to each large one, where it fits."""
    for b in range(len(packed.bins)):
        for i in medium:
            if lengths[i] <= packed.room[b]:
                packed.put(i, b)
                medium.remove(i)
                break


def _add_small_pairs(packed: OpenBins, lengths: np.ndarray, small: list[int]) -> None:
    """Phase 3: two small items where no medium one went, from the last bin back."""
    for b in range(len(packed.bins) - 1, -1, -1):
        if len(packed.bins[b]) > 1 or len(small) < 2:
            continue
        if lengths[small[-1]] + lengths[small[-2]] > packed.room[b]:
            continue
        least = small.pop()
        for i in small:
            if lengths[i] + lengths[least] <= packed.room[b]:
                packed.put(least, b)
                packed.put(i, b)
                small.remove(i)
                break
        else:
            small.append(least)
