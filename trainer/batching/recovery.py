"""After an out-of-memory error: the rest of the step under a lower budget. Pure; every rank
computes the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from time import perf_counter

import numpy as np

from trainer.batching.assignment import Assignment
from trainer.batching.bounds import lower_bounds
from trainer.batching.budget import lowered_budget
from trainer.batching.cost import Ints
from trainer.batching.inputs import BUDGET_KEYS
from trainer.batching.packing import open_bins
from trainer.batching.pieces import cut_groups, single_sequences
from trainer.batching.planner import Plan, plan_of


def after_out_of_memory(
    plan: Plan, k: int, ranks: Collection[int], *, key: str = BUDGET_KEYS
) -> Plan:
    """The plan that goes on from micro-batch ``k``, which ran out of memory on ``ranks``.

    Micro-batches before ``k`` stay as they are: they are done. From ``k`` on, each failed rank's
    micro-batches are split to its lowered budget. When every micro-batch synchronises, the other
    ranks run zero-loss fillers during the extra parts, so the count stays equal everywhere; else
    only the failed ranks change. The returned plan carries the new budgets, for the steps to come.
    Raises UserError when the failed micro-batch is one sequence that nothing can split.
    """
    began = perf_counter()
    limits = {r: _limit(plan, k, r, key) for r in ranks}
    budgets = plan.budgets.copy()
    for r, limit in limits.items():
        # A longer sequence that waits on this rank keeps the budget up; the failed micro-batch is
        # split all the same.
        waiting = [_longest(plan, micro_batch) for micro_batch in plan.micro_batches[r][k:]]
        budgets[r] = max(limit, *waiting)
    parts: list[list[list[Ints]]] = []
    for r, rank in enumerate(plan.micro_batches):
        parts.append([[micro_batch] for micro_batch in rank])
        if r in limits:
            parts[r][k] = split(plan, rank[k], limits[r])
            for i in range(k + 1, len(rank)):
                parts[r][i] = split(plan, rank[i], int(budgets[r]))
    if plan.sync == "micro":
        _add_fillers(parts)
    micro_batches = [[part for split_ in rank for part in split_] for rank in parts]
    checked = plan.budgets if k else budgets  # what ran before keeps the cap it ran under
    bounds = lower_bounds(plan.sequences, plan.cost, checked, plan.sync)
    assignment = Assignment.of(micro_batches)
    recovered = plan_of(assignment, plan.sequences, plan.cost, checked, plan.sync, bounds, began)
    return replace(recovered, budgets=budgets)


def _limit(plan: Plan, k: int, rank: int, key: str) -> int:
    """Tokens to which micro-batch ``k`` of ``rank`` has to be split."""
    failed = plan.micro_batches[rank][k]
    if failed.size == 0:
        raise ValueError(
            f"rank {rank} ran out of memory on micro-batch {k}, which is an empty filler"
        )
    return lowered_budget(plan.tokens[rank][k], _longest(plan, failed), key=key)


def _longest(plan: Plan, micro_batch: Ints) -> int:
    return int(plan.sequences.lengths[micro_batch].max(initial=0))


def _add_fillers(parts: list[list[list[Ints]]]) -> None:
    """Give every rank equally many parts of each micro-batch; ``parts`` is [rank][k][part]."""
    for k in range(len(parts[0])):
        most = max(len(rank[k]) for rank in parts)
        for rank in parts:
            rank[k] = rank[k] + [np.zeros(0, np.int64)] * (most - len(rank[k]))


def split(plan: Plan, micro_batch: Ints, budget: int) -> list[Ints]:
    """Parts of a micro-batch [sequences], each within ``budget`` tokens; itself when it fits."""
    if not micro_batch.size:
        return [micro_batch]
    sequences = plan.sequences.subset(micro_batch)
    if sequences.shared:
        pieces = cut_groups(sequences, plan.cost, micro_batch.size, budget)
    else:
        pieces = single_sequences(sequences, plan.cost)
    bins = open_bins(pieces.tokens, budget)[pieces.piece_of]
    return [micro_batch[bins == b] for b in range(int(bins.max()) + 1)]
