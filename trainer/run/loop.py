"""The training step on one screen: rollout, reward, log-probs, advantages, plan, update, log,
checkpoint.
"""

from __future__ import annotations

import time
from pathlib import Path

from trainer.base import signals
from trainer.base.environment import RankInfo
from trainer.base.errors import EXIT_OK, EXIT_REQUEUE, UserError
from trainer.config.schema import Config
from trainer.experience.weight_sync import LOST
from trainer.ranks.world import join, leave
from trainer.run.build import Context, build, endless
from trainer.run.checkpoints import Keeper
from trainer.run.data_check import require_sound_data
from trainer.run.finish import close_run
from trainer.run.reporter import Show
from trainer.run.step import rl_batch, sft_batch, update_policy

COLLECTIVE_TIMEOUT_S = 1800.0
"""Bounds every wait for another rank once all have met: a rank that died is an error on the others,
never a hang.
"""


def train(config: Config, run_dir: Path, info: RankInfo) -> int:
    """Run this rank to the end of the run, or to a saved stop; the exit code."""
    require_ranks(config, info)
    device, meet_s = config.trainer.device, config.trainer.join_timeout_s
    world = join(
        info, device=device, run_dir=run_dir, meet_s=meet_s, timeout_s=COLLECTIVE_TIMEOUT_S
    )
    try:
        ctx = build(config, run_dir, info, world)
        with ctx, Keeper(ctx) as keeper, Show(ctx, keeper) as show:
            show.code = run(ctx, keeper, show)
            return show.code
    finally:
        leave()


def require_ranks(config: Config, info: RankInfo) -> None:
    """Raise UserError when other than the ranks that the batch sizes were checked for have been
    started.
    """
    nodes, ranks = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if info.world_size != nodes * ranks:
        raise UserError(
            f"{info.world_size} rank(s) were started, but trainer.nnodes={nodes} times "
            f"trainer.n_gpus_per_node={ranks} "
            f"is {nodes * ranks}: set both to what there is"
        )


def run(ctx: Context, keeper: Keeper, show: Show) -> int:
    """All iterations from the restored one on."""
    trainer, timers = ctx.config.trainer, ctx.timers
    step = keeper.step
    ctx.engine.keep_private()
    if trainer.val_only:
        show.log(step, show.validation(step))
        return EXIT_OK
    if step == 0:
        require_sound_data(ctx, show.tracker.message)
    ctx.loader.start()
    batches, metrics = endless(ctx.loader), dict[str, float]()
    try:
        if step == 0 and trainer.val_before_train:
            show.log(step, show.validation(step))
        while step < ctx.total_steps:
            began = time.perf_counter()
            batch, metrics = rl_batch(ctx, step + 1) if ctx.is_rl else sft_batch(ctx, batches)
            with timers("update_actor"):
                updates, learnt = update_policy(ctx, batch, step + 1)
            step += 1
            ctx.samples_seen += len(batch)
            timers.add("step", time.perf_counter() - began)
            metrics |= learnt | show.step_metrics(step, batch, updates) | keeper.metrics()
            last = step == ctx.total_steps
            if last or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
                metrics |= show.validation(step)
            show.log(step, metrics)
            stop = keeper.stop_requested(signals.requested())
            keeper.after_step(step, metrics, last=last, stop=stop, sync=show.tracker.sync)
            if stop is not None and not last:
                return show.stopped(step, stop, EXIT_REQUEUE)
    except LOST as error:
        if show.last_logged < step:
            show.log(step, metrics)
        raise keeper.lost(step, error, sync=show.tracker.sync) from error
    close_run(ctx, keeper, show)
    return EXIT_OK
