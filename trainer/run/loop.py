"""The life of a run on one rank: join the others, build, step after step, finish."""

from __future__ import annotations

from pathlib import Path

from trainer.base import signals
from trainer.base.errors import EXIT_OK, EXIT_REQUEUE, UserError
from trainer.base.rank_info import RankInfo
from trainer.config.schema import Config
from trainer.data import endless
from trainer.experience.weight_sync import ENDS_THE_RUN
from trainer.models import make_builtin
from trainer.ranks.world import join, leave
from trainer.run.build import build
from trainer.run.checkpoints import RunCheckpoints
from trainer.run.context import RunContext
from trainer.run.data_check import check_data
from trainer.run.finish import finish
from trainer.run.reporter import RunReporter
from trainer.run.step import training_step

COLLECTIVE_TIMEOUT_S = 1800.0
"""Bounds every wait for another rank once all have met: a dead rank is an error on the others."""


def train(config: Config, run_dir: Path, info: RankInfo) -> int:
    """Run this rank to the end of the run, or to a saved stop. Returns the exit code.

    Raises UserError when the number of ranks is not the configured one, and for what ``build``,
    the data and the checkpoints refuse.
    """
    require_ranks(config, info)
    make_builtin(config.actor_rollout_ref.model.path)  # before there is a process group
    world = join(
        info,
        device=config.trainer.device,
        run_dir=run_dir,
        meet_s=config.trainer.join_timeout_s,
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    try:
        ctx = build(config, run_dir, world)
        with ctx, RunCheckpoints(ctx) as checkpoints, RunReporter(ctx, checkpoints) as reporter:
            reporter.exit_code = run(ctx, checkpoints, reporter)
            return reporter.exit_code
    finally:
        leave()


def require_ranks(config: Config, info: RankInfo) -> None:
    """Raise UserError when the number of ranks started is not the one in the config."""
    nodes = config.trainer.nnodes
    ranks = config.trainer.n_gpus_per_node
    if info.world_size != nodes * ranks:
        raise UserError(
            f"{info.world_size} rank(s) were started, but trainer.nnodes={nodes} times "
            f"trainer.n_gpus_per_node={ranks} is {nodes * ranks}: set both to what there is"
        )


def run(ctx: RunContext, checkpoints: RunCheckpoints, reporter: RunReporter) -> int:
    """All training steps from the restored one on. Returns the exit code."""
    trainer = ctx.config.trainer
    step = checkpoints.restored_step
    ctx.engine.hide_from_forks()
    if trainer.val_only:
        reporter.log(step, reporter.validation(step))
        return EXIT_OK
    if step == 0:
        check_data(ctx, reporter.message)
    ctx.loader.start()
    sft_batches = endless(ctx.loader)
    metrics: dict[str, float] = {}
    try:
        if step == 0 and trainer.val_before_train:
            reporter.log(step, reporter.validation(step))
        while step < ctx.total_steps:
            result = training_step(ctx, step + 1, sft_batches)
            step += 1
            metrics = result.metrics | reporter.step_metrics(step, result) | checkpoints.metrics()
            last = step == ctx.total_steps
            if last or (trainer.test_freq > 0 and step % trainer.test_freq == 0):
                metrics |= reporter.validation(step)
            reporter.log(step, metrics)
            stop = checkpoints.stop_requested(signals.requested())
            checkpoints.after_step(step, metrics, last=last, stop=stop, sync=reporter.sync)
            if stop is not None and not last:
                reporter.report_stop(step, stop)
                return EXIT_REQUEUE
    except ENDS_THE_RUN as error:
        if reporter.last_logged < step:
            reporter.log(step, metrics)
        raise checkpoints.save_lost_run(step, error, sync=reporter.sync) from error
    finish(ctx, checkpoints, reporter)
    return EXIT_OK
