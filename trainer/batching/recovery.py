"""After an out-of-memory error: the rest of the step under a lower budget. Pure; every rank
computes the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from time import perf_counter

import numpy as np

from trainer.batching.bounds import prove
from trainer.batching.budget import lowered_budget
from trainer.batching.cost import Ints
from trainer.batching.inputs import BUDGET_KEYS
from trainer.batching.layout import Layout
from trainer.batching.packing import open_bins
from trainer.batching.planner import Plan, weigh_plan
from trainer.batching.units import pieces, singles, subset


def after_out_of_memory(
    plan: Plan, k: int, ranks: Collection[int], *, key: str = BUDGET_KEYS
) -> Plan:
    """The plan that goes on from micro-batch ``k``, which ran out of memory on ``ranks``.

    Micro-batches before ``k`` stay as they are: they are done. From ``k`` on, each failed rank's
    micro-batches are split to its lowered budget. When every micro-batch synchronises, the other
    ranks run zero-loss fillers beside the extra parts, so the count stays equal everywhere; else
    only the failed ranks change. The returned plan carries the new budgets, for the steps to come.
    Raises :class:`~trainer.base.errors.UserError` when the failed micro-batch is one sequence that
    nothing can split.
    """
    began = perf_counter()
    budgets = plan.budgets.copy()
    limits: dict[int, int] = {}
    for r in ranks:
        failed = plan.micro_batches[r][k]
        if failed.size == 0:
            raise ValueError(
                f"rank {r} ran out of memory on micro-batch {k}, which is an empty filler"
            )
        limits[r] = lowered_budget(
            plan.tokens[r][k], int(plan.cargo.lengths[failed].max()), key=key
        )
        # A longer sequence that waits on this rank keeps the budget up; the failed micro-batch is
        # split all the same.
        budgets[r] = max(
            limits[r],
            *(int(plan.cargo.lengths[mb].max(initial=0)) for mb in plan.micro_batches[r][k:]),
        )
    parts = [
        [
            [mb]
            if i < k or r not in limits
            else split(plan, mb, limits[r] if i == k else int(budgets[r]))
            for i, mb in enumerate(rank)
        ]
        for r, rank in enumerate(plan.micro_batches)
    ]
    if plan.sync == "micro":
        empty = np.zeros(0, np.int64)
        widths = [max(len(p) for p in row) for row in zip(*parts, strict=True)]
        layout = [
            [
                mb
                for p, width in zip(rank, widths, strict=True)
                for mb in p + [empty] * (width - len(p))
            ]
            for rank in parts
        ]
    else:
        layout = [[mb for p in rank for mb in p] for rank in parts]
    done = plan.budgets if k else budgets  # what ran before keeps the cap it ran under
    proof = prove(plan.cargo, plan.cost, done, plan.sync)
    recovered = weigh_plan(plan.cargo, plan.cost, done, plan.sync, Layout.of(layout), began, proof)
    return replace(recovered, budgets=budgets)


def split(plan: Plan, micro_batch: Ints, budget: int) -> list[Ints]:
    """Parts of a micro-batch, each within ``budget`` tokens; itself when it fits."""
    cargo = subset(plan.cargo, micro_batch)
    if not micro_batch.size:
        return [micro_batch]
    units = (
        pieces(cargo, plan.cost, micro_batch.size, budget)
        if cargo.shared
        else singles(cargo, plan.cost)
    )
    bins = np.empty(micro_batch.size, np.int64)
    bins[units.members] = np.repeat(open_bins(units.tokens, budget), np.diff(units.starts))
    return [micro_batch[bins == b] for b in range(int(bins.max()) + 1)]
