"""How one phase stows its sequences: the settings behind ``use_dynamic_bsz``, and the plan they
give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.batching import CostModel, Plan, plan
from trainer.batching.static import static_plan
from trainer.data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Stowage:
    """One phase's way to cut micro-batches."""

    dynamic: bool
    """Cut by tokens; otherwise ``micro_size`` sequences each, padded to the longest."""
    budget: int | Sequence[int]
    """Tokens of a micro-batch, one number or one a rank. A hard cap; not read by the static
    baseline.
    """
    micro_size: int | None = None
    """Sequences of a micro-batch of the static baseline."""
    buckets: Sequence[int] | None = None
    """Rising boundaries of length buckets that never mix, or None."""
    bucket_by: Literal["prompt", "total"] = "prompt"
    """Which length the buckets mean."""
    share_prompts: bool = False
    """Hold the prompt of a group once per micro-batch."""
    sync: Literal["micro", "step"] = "step"
    """Where ranks wait for each other."""


def stow(batch: Batch, stowage: Stowage, ranks: int, cost: CostModel | None = None) -> Plan:
    """The plan of one pass over ``batch``, the same on every rank since all ranks hold the same
    batch.
    """
    lengths = batch.lengths.numpy()
    if not stowage.dynamic:
        if stowage.micro_size is None:
            raise AssertionError(
                "config validation lets no static phase through without a micro-batch size"
            )
        return static_plan(lengths, stowage.micro_size, ranks, cost=cost)
    grouped = stowage.share_prompts
    return plan(
        lengths,
        stowage.budget,
        ranks,
        stowage.sync,
        cost=cost,
        groups=batch.rows["groups"].numpy() if grouped else None,
        prompt_lengths=batch.rows["prompt_lengths"].numpy(),
        buckets=stowage.buckets,
        bucket_by=stowage.bucket_by,
        share_prompts=grouped,
    )
