"""A check of the training data before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.data import check_samples, worker_count
from trainer.ranks.agreement import agreed
from trainer.run.context import RunContext


def check_data(ctx: RunContext, report: Callable[[str], None]) -> None:
    """Raise UserError, on all ranks, for a sample that this run will meet and can't train on.

    Rank 0 reads the samples and reports how many were cut, and when there was no time for all of
    them. Data that a built-in task makes are not checked.
    """
    data = ctx.config.data
    over_sampling = ctx.config.actor_rollout_ref.rollout.over_sampling
    with agreed(ctx.world):
        if not ctx.world.is_main or data.task is not None:
            return
        # Over-sampled prompts may be left over at the end: at most one more batch is read.
        batches = math.ceil(ctx.total_steps * over_sampling) + 1
        indices = ctx.loader.upcoming(batches)
        workers = worker_count(data.num_workers, ctx.world.local_size)
        checked = check_samples(ctx.train_data, indices, num_workers=workers)
        if checked.samples < len(indices):
            report(
                f"Looked at {checked.samples:,} of this run's {len(indices):,} samples; the others "
                "are read as they come."
            )
        if checked.cut_prompts or checked.cut_responses:
            report(
                f"data.truncation={data.truncation} cuts {checked.cut_prompts:,} prompts and "
                f"{checked.cut_responses:,} responses of {checked.samples:,} samples."
            )
