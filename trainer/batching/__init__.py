"""Token-budget batching: lengths in, plan out. numpy only, and numba where it is installed."""

from __future__ import annotations

from trainer.batching.balance import balance_ranks
from trainer.batching.buckets import assign_buckets, bucket_names, bucket_speeds
from trainer.batching.budget import (
    lowered_budget,
    mean_lengths,
    measured_budget,
    recommended_budget,
)
from trainer.batching.calibrate import Calibration, Calibrator, calibrate
from trainer.batching.clip import adaptive_clip
from trainer.batching.cost import CostModel, ModelShape
from trainer.batching.planner import Plan, plan
from trainer.batching.recovery import after_out_of_memory
from trainer.batching.static import static_plan
from trainer.batching.warm import warm_up

__all__ = [
    "Calibration",
    "Calibrator",
    "CostModel",
    "ModelShape",
    "Plan",
    "adaptive_clip",
    "after_out_of_memory",
    "assign_buckets",
    "balance_ranks",
    "bucket_names",
    "bucket_speeds",
    "calibrate",
    "lowered_budget",
    "mean_lengths",
    "measured_budget",
    "plan",
    "recommended_budget",
    "static_plan",
    "warm_up",
]
