"""Token-budget batching: lengths in, plan out. numpy only."""

from __future__ import annotations

from trainer.batching.buckets import assign_buckets, bucket_names, bucket_speeds
from trainer.batching.cost import CostModel, ModelShape
from trainer.batching.plan import Plan, plan

__all__ = ["CostModel", "ModelShape", "Plan", "assign_buckets", "bucket_names", "bucket_speeds", "plan"]
