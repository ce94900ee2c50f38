"""First layouts: units into micro-batches under hard caps. Everything here is greedy; refinement comes after."""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heapify, heappop, heappush

import numpy as np

from trainer.batching.cost import Floats, Ints


def best_fit(tokens: Ints, caps: Ints) -> Ints | None:
    """Bin of each unit by best-fit decreasing over bins of ``caps`` tokens, or None when one finds no room."""
    room = sorted((int(c), b) for b, c in enumerate(caps.tolist()))
    out = np.empty(tokens.size, np.int64)
    for u in np.argsort(-tokens, kind="stable").tolist():
        size = int(tokens[u])
        at = bisect_left(room, (size, -1))
        if at == len(room):
            return None
        left, b = room.pop(at)
        out[u] = b
        insort(room, (left - size, b))
    return out


def lightest_fit(cost: Floats, tokens: Ints, caps: Ints) -> Ints | None:
    """Bin of each unit, heaviest first, into the lightest bin with room, or None when one finds no room."""
    load = [(0.0, b) for b in range(caps.size)]
    heapify(load)
    room = caps.tolist()
    out = np.empty(tokens.size, np.int64)
    sizes, weights = tokens.tolist(), cost.tolist()
    for u in np.argsort(-cost, kind="stable").tolist():
        size = sizes[u]
        full = []
        while load and room[load[0][1]] < size:
            full.append(heappop(load))
        if not load:
            return None
        weight, b = heappop(load)
        out[u] = b
        room[b] -= size
        heappush(load, (weight + weights[u], b))
        for entry in full:
            heappush(load, entry)
    return out


def open_bins(tokens: Ints, cap: int) -> Ints:
    """Bin of each unit by best-fit decreasing, opening bins of ``cap`` tokens as needed. Bins count from 0."""
    room: list[tuple[int, int]] = []
    out = np.empty(tokens.size, np.int64)
    count = 0
    sizes = tokens.tolist()
    for u in np.argsort(-tokens, kind="stable").tolist():
        size = sizes[u]
        at = bisect_left(room, (size, -1))
        if at < len(room):
            left, b = room.pop(at)
        else:
            left, b, count = cap, count, count + 1
        out[u] = b
        insort(room, (left - size, b))
    return out
