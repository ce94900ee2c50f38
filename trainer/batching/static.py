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
from trainer.batching.planner import Plan
from trainer.batching.sequences import check_sequences


def static_plan(
    lengths: ArrayLike, micro_size: int, ranks: int, *, cost: CostModel | None = None
) -> Plan:
    """Deal sequences to ``ranks`` in their order and cut each rank's into micro-batches of
    ``micro_size`` sequences.

    ``Plan.tokens`` are real tokens; ``Plan.padding`` is what the padding to each micro-batch's
    longest adds, and costs are those of the padded rows. Every rank runs equally many
    micro-batches. Raises UserError for wrong lengths or a wrong ``micro_size``.
    """
    began = perf_counter()
    sizes = check_lengths(lengths)
    if micro_size < 1:
        raise UserError(
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro_size}: write 1 or more"
        )
    model = cost or TOKENS
    micro = _deal(sizes.size, micro_size, ranks)
    padded = [[_longest(sizes, part) * part.size for part in rank] for rank in micro]
    costs = [[_padded_cost(model, sizes, part) for part in rank] for rank in micro]
    return Plan(
        micro_batches=micro,
        tokens=[[int(sizes[part].sum()) for part in rank] for rank in micro],
        costs=costs,
        budgets=np.full(ranks, max(map(max, padded)), np.int64),
        sync="micro",
        critical_path=float(np.asarray(costs).max(axis=0).sum()),
        critical_path_bound=float(model(sizes).sum()) / ranks,
        micro_batches_bound=len(micro[0]),
        tokens_saved=0,
        sequences=check_sequences(sizes, None, None, None, "total", False, False),
        cost=model,
        padding=sum(map(sum, padded)) - int(sizes.sum()),
        plan_ms=(perf_counter() - began) * 1e3,
    )


def _deal(count: int, micro_size: int, ranks: int) -> list[list[Ints]]:
    """Indices of the sequences of each micro-batch, [rank][k]."""
    most = -(-count // ranks)
    num_micro_batches = max(1, -(-most // micro_size))
    out: list[list[Ints]] = []
    for rank in range(ranks):
        of_rank = np.arange(rank, count, ranks)
        starts = range(0, num_micro_batches * micro_size, micro_size)
        out.append([of_rank[start : start + micro_size] for start in starts])
    return out


def _longest(sizes: Ints, part: Ints) -> int:
    return int(sizes[part].max(initial=0))


def _padded_cost(model: CostModel, sizes: Ints, part: Ints) -> float:
    """Cost of a micro-batch whose sequences are padded to its longest."""
    if not part.size:
        return 0.0
    return float(model([_longest(sizes, part)])[0]) * part.size
