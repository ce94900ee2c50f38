"""Token-budget batching: lengths in, micro-batches of each rank out. numpy only, and numba where it
is installed.

Read ``planner.py`` first (``plan`` and ``Plan``), then ``sequences.py``, ``pieces.py``,
``greedy.py`` and ``search.py``; ``bounds.py`` has what no plan can beat, ``loops/`` the inner
loops. ``recovery.py`` splits micro-batches after an out-of-memory error, ``calibrate.py`` fits the
cost model of ``cost.py`` to measured times, ``budget.py`` finds a token budget.
"""

from __future__ import annotations

from trainer.batching.buckets import assign_buckets, bucket_names, bucket_speeds
from trainer.batching.budget import (
    lowered_budget,
    measured_budget,
    recommended_budget,
)
from trainer.batching.calibrate import Calibration, Calibrator, calibrate
from trainer.batching.cost import CostModel
from trainer.batching.gradient_clip import adaptive_clip
from trainer.batching.planner import Plan, plan
from trainer.batching.recovery import after_out_of_memory
from trainer.batching.static import static_plan
from trainer.batching.warm import warm_up

__all__ = [
    "Calibration",
    "Calibrator",
    "CostModel",
    "Plan",
    "adaptive_clip",
    "after_out_of_memory",
    "assign_buckets",
    "bucket_names",
    "bucket_speeds",
    "calibrate",
    "lowered_budget",
    "measured_budget",
    "plan",
    "recommended_budget",
    "static_plan",
    "warm_up",
]
