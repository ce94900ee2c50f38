"""The training data, looked at before the first step."""

from __future__ import annotations

import math
from collections.abc import Callable

from trainer.data import require_sound, worker_count
from trainer.experience.weight_sync import agreed
from trainer.run.build import Context


def require_sound_data(ctx: Context, say: Callable[[str], None]) -> None:
    """Raise UserError, on all ranks, for a sample that this run will meet and can't train on. Rank
    0 looks at them, and ``say``s so where it could not look at all of them.

    What a task of ours makes is sound.
    """
    data, over = ctx.config.data, ctx.config.actor_rollout_ref.rollout.over_sampling
    with agreed(ctx.world):
        if ctx.world.is_main and data.task is None:
            # Of what is over-sampled some is left over at the end.
            ahead = ctx.loader.ahead(math.ceil(ctx.total_steps * over) + 1)
            workers = worker_count(data.num_workers, ctx.info.local_world_size)
            looked = require_sound(ctx.train_data, ahead, num_workers=workers)
            if looked < len(ahead):
                say(
                    f"Looked at {looked:,} of this run's {len(ahead):,} samples; the others are "
                    "read as they come."
                )
