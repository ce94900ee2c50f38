"""The life of a run on one rank: join the others, build, step after step, finish."""

from __future__ import annotations

from pathlib import Path

from trainer.base import signals
from trainer.base.errors import EXIT_OK, EXIT_REQUEUE, UserError
from trainer.base.rank_info import RankInfo
from trainer.base.signals import StopRequested
from trainer.config.schema import Config
from trainer.config.schema.trainer import Trainer
from trainer.data import endless
from trainer.experience.weight_sync import ENDS_THE_RUN
from trainer.models import make_builtin
from trainer.ranks.world import join, leave
from trainer.run.build import build
from trainer.run.checkpoints import RunCheckpoints
from trainer.run.context import RunContext
from trainer.run.critic import critic_engines
from trainer.run.data_check import check_data
from trainer.run.finish import finish
from trainer.run.profiler import StepProfiler
from trainer.run.reporter import RunReporter
from trainer.run.step import training_step
from trainer.run.stop import StopTime, announce_stops

CLOSE_S = 10.0
"""How long engines, threads and Python may take to end once a stopped run is saved and closed: code
of users may hang.
"""
COLLECTIVE_TIMEOUT_S = 1800.0
"""Bounds every wait for another rank once all have met: a dead rank is an error on the others."""


def train(config: Config, run_dir: Path, info: RankInfo) -> int:
    """Run this rank to the end of the run, or to a saved stop. Returns the exit code.

    Raises UserError when the number of ranks is not the configured one, and for what ``build``,
    the data and the checkpoints refuse.
    """
    require_ranks(config, info)
    make_builtin(config.actor_rollout_ref.model.path)  # before there is a process group
    if config.uses_critic:
        make_builtin(config.critic.model.path)
    world = join(
        info,
        device=config.trainer.device,
        run_dir=run_dir,
        meet_s=config.trainer.join_timeout_s,
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    try:
        with build(config, run_dir, world) as ctx:
            with RunCheckpoints(ctx) as checkpoints, RunReporter(ctx, checkpoints) as reporter:
                reporter.exit_code = run(ctx, checkpoints, reporter)
            if reporter.exit_code == EXIT_REQUEUE:
                signals.exit_within(CLOSE_S, EXIT_REQUEUE)
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
    step = checkpoints.restored_step
    ctx.stop_step = step
    announce_stops(ctx, reporter)
    for engine in (ctx.engine, *critic_engines(ctx.critic).values()):
        engine.hide_from_forks()
    if ctx.config.trainer.val_only:
        reporter.log(step, reporter.validation(step))
        return EXIT_OK
    if step == 0:
        check_data(ctx, reporter.message)
    ctx.loader.start()
    cause = take_steps(ctx, checkpoints, reporter)
    if cause is not None:
        reporter.report_stop(ctx.stop_step, cause)
        return EXIT_REQUEUE
    finish(ctx, checkpoints, reporter)
    return EXIT_OK


def take_steps(ctx: RunContext, checkpoints: RunCheckpoints, reporter: RunReporter) -> str | None:
    """Train, validate, log and save step after step. Returns why the run stopped early, or None.

    A stop leaves a step before its update, or in its validation; the last step whose update has
    ended is then saved.
    """
    step = checkpoints.restored_step
    sft_batches = endless(ctx.loader)
    stop_time = StopTime(ctx.config.trainer)
    profiled = StepProfiler(ctx, reporter.message)
    metrics: dict[str, float] = {}
    try:
        finish_restored_step(ctx, checkpoints, reporter)
        while step < ctx.total_steps:
            with profiled(step + 1):
                result = training_step(ctx, step + 1, sft_batches)
            step += 1
            metrics = result.metrics | reporter.step_metrics(step, result) | checkpoints.metrics()
            last = step == ctx.total_steps
            ctx.unlogged = dict(metrics)
            if last or is_validated(ctx.config.trainer, step):
                metrics |= reporter.validation(step)
            reporter.log(step, metrics)
            ctx.unlogged = None
            reporter.report_rollback(step, checkpoints.roll_back(step, metrics, last=last))
            reporter.main_message(stop_time.observe(metrics, checkpoints.save_s))
            stop = checkpoints.stop_requested(signals.requested())
            checkpoints.after_step(step, metrics, last=last, stop=stop, sync=reporter.sync)
            if stop is not None and not last:
                return stop
    except ENDS_THE_RUN as error:
        if reporter.last_logged < step:
            reporter.log(step, metrics)
        ctx.unlogged = None
        raise checkpoints.save_lost_run(step, error, sync=reporter.sync) from error
    except StopRequested as stop_request:
        if signals.leaves_at_once():
            raise
        checkpoints.save_stopped(step, stop_request.cause, metrics, sync=reporter.sync)
        return stop_request.cause
    return None


def finish_restored_step(
    ctx: RunContext, checkpoints: RunCheckpoints, reporter: RunReporter
) -> None:
    """Validate and log the restored step where a stop kept it from that; at step 0 validate if the
    settings say so.
    """
    step = checkpoints.restored_step
    if ctx.unlogged is not None:
        metrics = ctx.unlogged | reporter.validation(step)
        reporter.log(step, metrics)
        ctx.unlogged = None
        checkpoints.observe(step, metrics)
    elif step == 0 and ctx.config.trainer.val_before_train:
        reporter.log(step, reporter.validation(step))


def is_validated(trainer: Trainer, step: int) -> bool:
    """Whether a step before the last one is validated."""
    return trainer.test_freq > 0 and step % trainer.test_freq == 0
