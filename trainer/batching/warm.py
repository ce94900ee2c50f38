"""Getting compiled loops ready before the first step."""

from __future__ import annotations

import numpy as np

from trainer.batching.loops import COMPILE_FROM
from trainer.batching.planner import plan


def warm_up(sequences: int) -> None:
    """Load what plans of so many sequences run on: half a second, and half a minute on a machine
    that has compiled nothing before.
    """
    if sequences < COMPILE_FROM:
        return
    lengths = np.random.default_rng(0).integers(50, 600, 8 * COMPILE_FROM)
    groups = np.repeat(np.arange(lengths.size // 2), 2)
    for budget, sync in ((600, "micro"), (1200, "step")):
        plan(lengths, budget, 4, sync)  # type: ignore[arg-type]
        plan(
            lengths + 50,
            2 * budget,
            4,
            groups=groups,
            prompt_lengths=np.full(lengths.size, 50),
            share_prompts=True,
        )
    plan(lengths, 600, 4, buckets=[100, 300], bucket_by="total")
