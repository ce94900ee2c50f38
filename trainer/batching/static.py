"""The baseline that token budgets are held to: a fixed number of sequences per micro-batch, padded
to its longest.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np
from numpy.typing import ArrayLike

from trainer.base.errors import UserError
from trainer.batching.cost import TOKENS, CostModel, Ints
from trainer.batching.inputs import check_lengths
from trainer.batching.planner import Plan, make_cargo


def static_plan(
    lengths: ArrayLike, micro_size: int, ranks: int, *, cost: CostModel | None = None
) -> Plan:
    """Deal sequences to ``ranks`` in the order given and cut each rank's into micro-batches of
    ``micro_size``.

    ``Plan.tokens`` are real tokens; ``Plan.padding`` is what the padding to each micro-batch's
    longest adds, and costs are those of the padded rows. Every rank runs equally many
    micro-batches.
    """
    began = perf_counter()
    sizes = check_lengths(lengths)
    if micro_size < 1:
        raise UserError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro_size}: write 1 or more"
        )
    model = cost or TOKENS
    most = -(-len(sizes) // ranks)
    count = max(1, -(-most // micro_size))
    micro: list[list[Ints]] = []
    for rank in range(ranks):
        mine = np.arange(rank, len(sizes), ranks)
        micro.append([mine[k * micro_size : (k + 1) * micro_size] for k in range(count)])
    padded = [[int(sizes[m].max()) * m.size if m.size else 0 for m in rank] for rank in micro]
    tokens = [[int(sizes[m].sum()) for m in rank] for rank in micro]
    costs = [
        [float(model([sizes[m].max()])[0]) * m.size if m.size else 0.0 for m in rank]
        for rank in micro
    ]
    return Plan(
        micro_batches=micro,
        tokens=tokens,
        costs=costs,
        budgets=np.full(ranks, max(map(max, padded)), np.int64),
        sync="micro",
        critical_path=float(np.asarray(costs).max(axis=0).sum()),
        critical_path_bound=float(model(sizes).sum()) / ranks,
        micro_batches_bound=count,
        tokens_saved=0,
        cargo=make_cargo(sizes, None, None, None, "total", False, False),
        cost=model,
        padding=sum(map(sum, padded)) - int(sizes.sum()),
        plan_ms=(perf_counter() - began) * 1e3,
    )
