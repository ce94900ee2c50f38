"""Budgets: recommended from the data (A6), measured from memory, lowered after an out-of-memory
error (A5).
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.base.errors import UserError
from trainer.batching.inputs import BUDGET_KEYS, LENGTH_KEYS

STEP = 64
"""Measured and lowered budgets are multiples of this many tokens."""

MEMORY_ADVICE = (
    "lower data.max_response_length; set actor_rollout_ref.rollout.enable_chunked_prefill=True; "
    "train in bf16 (mixed_precision=bf16); set "
    "actor_rollout_ref.model.enable_gradient_checkpointing=True; "
    "or offload (actor_rollout_ref.actor.optimizer_offload=True, then param_offload)"
)


def recommended_budget(mean_prompt: float, mean_response: float, concurrent: int) -> int:
    """Tokens for ``concurrent`` sequences of mean length, up to the next power of two.

    (210 + 380) x 24 -> 16384. Raises UserError unless the product is positive.
    """
    tokens = (mean_prompt + mean_response) * concurrent
    if tokens <= 0:
        raise UserError(
            f"a budget for {concurrent} sequences of {mean_prompt} + {mean_response} tokens: all "
            "must be > 0"
        )
    budget = 1
    while budget < tokens:
        budget *= 2
    return budget


def measured_budget(
    probes: Sequence[tuple[int, int]],
    free_bytes: int,
    *,
    longest: int,
    margin: float = 0.1,
    key: str = BUDGET_KEYS,
) -> int:
    """Budget of one rank in tokens, from the memory that trial micro-batches took.

    ``probes`` are (tokens, peak bytes above what is held between steps).

    Memory of a padding-free pass grows linearly in its tokens, so the largest two probes give slope
    and offset; ``margin`` of the free bytes stays unused. ``longest`` is the longest sequence the
    run can meet. Raises UserError when the budget would not hold it.
    """
    by_tokens = sorted(dict(probes).items())
    if len(by_tokens) < 2:
        raise ValueError("measured_budget needs probes of two different sizes")
    few, low = by_tokens[0]
    many, high = by_tokens[-1]
    slope = max((high - low) / (many - few), high / many * 0.5)
    offset = max(0.0, high - slope * many)
    budget = int((free_bytes * (1.0 - margin) - offset) / slope) // STEP * STEP
    if budget < longest:
        raise UserError(
            f"{key}=auto: free memory of {free_bytes / 2**30:.2f} GiB holds "
            f"{max(budget, 0)} tokens ({slope / 2**10:.0f} KiB each), but sequences have up to "
            f"{longest} tokens; {MEMORY_ADVICE}"
        )
    return budget


def lowered_budget(tokens: int, longest: int, *, key: str = BUDGET_KEYS) -> int:
    """The budget of a rank after a micro-batch of ``tokens`` tokens ran out of memory.

    Three quarters of it, but never below ``longest``, its longest sequence. Raises UserError when
    that sequence alone was the micro-batch: there is nothing to split.
    """
    if tokens <= longest:
        raise UserError(
            f"out of memory on a micro-batch of {tokens} tokens, which the longest sequence "
            f"({longest} tokens) needs: "
            f"no budget helps ({key}); {MEMORY_ADVICE}; limits: {LENGTH_KEYS}"
        )
    return max(longest, tokens * 3 // 4 // STEP * STEP, 1)
