"""The training data, looked at before the first step."""

from __future__ import annotations

import math

from trainer.data import require_sound, worker_count
from trainer.errors import UserError
from trainer.steps.context import Context
from trainer.steps.synced import same_on_all


def require_sound_data(ctx: Context) -> None:
    """Raise UserError, on all ranks, for a sample that this run will meet and can't train on. Rank 0 looks at them.

    What a task of ours makes is sound.
    """
    data, over = ctx.config.data, ctx.config.actor_rollout_ref.rollout.over_sampling
    error: UserError | None = None
    if ctx.world.is_main and data.task is None:
        batches = (
            math.ceil(ctx.total_steps * over) + 1
        )  # one step off, or left over, the next prompts are begun as well
        workers = worker_count(data.num_workers, ctx.info.local_world_size)
        try:
            require_sound(ctx.train_data, ctx.loader.ahead(batches), num_workers=workers)
        except UserError as found:
            error = found
    same_on_all(ctx.world, error)
