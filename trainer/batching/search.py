"""From cargo to layout: greedy first layouts for both regimes, the best of a few kept."""

from __future__ import annotations

import numpy as np

from trainer.batching import packing
from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.layout import Layout
from trainer.batching.units import Cargo, Units, pieces, singles


def search(cargo: Cargo, cost: CostModel, budgets: Ints, sync: str, *, keep_groups: bool) -> Layout:
    """A layout of ``cargo`` under ``budgets`` for the regime ``sync``."""
    if not cargo.lengths.size:
        return Layout(np.zeros(0, np.int64), np.full(budgets.size, int(sync == "micro")))
    if cargo.shared or keep_groups:
        units = pieces(cargo, cost, cargo.lengths.size, int(budgets.min()))
    else:
        units = singles(cargo, cost)
    layout = by_step(units, budgets) if sync == "step" else by_micro(units, budgets)
    bins = np.empty(cargo.lengths.size, np.int64)
    bins[units.members] = np.repeat(layout.bins, np.diff(units.starts))
    return Layout(bins, layout.counts)


def by_step(units: Units, budgets: Ints) -> Layout:
    """Ranks first (equal cost), then as few micro-batches as fit inside each rank."""
    rank = assign_ranks(units.cost, units.tokens, budgets)
    bins = np.empty(len(units), np.int64)
    counts = np.zeros(budgets.size, np.int64)
    for r in range(budgets.size):
        for bucket in np.unique(units.buckets[rank == r]):
            mine = np.flatnonzero((rank == r) & (units.buckets == bucket))
            inside = packing.open_bins(units.tokens[mine], int(budgets[r]))
            bins[mine] = counts.sum() + inside
            counts[r] += int(inside.max()) + 1
    return Layout(bins, counts)


def assign_ranks(cost: Floats, tokens: Ints, budgets: Ints) -> Ints:
    """Rank of each unit: heaviest first onto the least loaded rank whose budget holds it."""
    load = np.zeros(budgets.size)
    out = np.empty(cost.size, np.int64)
    for u in np.argsort(-cost, kind="stable").tolist():
        r = int(np.where(budgets >= tokens[u], load, np.inf).argmin())
        out[u] = r
        load[r] += cost[u]
    return out


def by_micro(units: Units, budgets: Ints) -> Layout:
    """Equal counts on all ranks; buckets planned one after the other."""
    ranks = int(budgets.size)
    parts: list[tuple[Ints, Ints, int]] = []
    for bucket in np.unique(units.buckets):
        mine = np.flatnonzero(units.buckets == bucket)
        row, rank, rows = rows_of(units.cost[mine], units.tokens[mine], budgets)
        parts.append((mine, row * ranks + rank, rows))
    total = sum(rows for _, _, rows in parts)
    bins = np.empty(len(units), np.int64)
    done = 0
    for mine, where, rows in parts:
        bins[mine] = (where % ranks) * total + done + where // ranks
        done += rows
    return Layout(bins, np.full(ranks, total))


def rows_of(cost: Floats, tokens: Ints, budgets: Ints) -> tuple[Ints, Ints, int]:
    """(row, rank, rows) of units of one bucket, as few rows as the greedy layouts reach."""
    ranks = int(budgets.size)
    rows = max(1, -(-int(tokens.sum()) // int(budgets.sum())))
    while True:
        caps = np.repeat(budgets, rows)
        bins = packing.lightest_fit(cost, tokens, caps)
        if bins is None:
            bins = packing.best_fit(tokens, caps)
        if bins is not None:
            break
        rows += 1
    rank, slot = bins // rows, bins % rows
    weight = np.bincount(bins, cost, minlength=ranks * rows)
    for cap in np.unique(budgets):
        same = np.flatnonzero(budgets == cap)
        numbers = (same[:, None] * rows + np.arange(rows)).reshape(-1)
        order = numbers[np.argsort(-weight[numbers], kind="stable")]
        new = np.empty(ranks * rows, np.int64)
        new[order] = np.arange(order.size)
        chosen = np.isin(bins, numbers)
        rank[chosen] = same[new[bins[chosen]] % same.size]
        slot[chosen] = new[bins[chosen]] // same.size
    return slot, rank, rows
