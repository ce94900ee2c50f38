"""How long a save is expected to take, and whether it fits into the grace period and the job."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping

from trainer.base.metrics_file import METRICS_FILE, last_value
from trainer.checkpoint.schedule import must_save_by
from trainer.config.schema.trainer import Trainer
from trainer.plan.memory import checkpoint_bytes, predicted_save_s
from trainer.run.context import RunContext
from trainer.run.reference import reference_state

ASSUMED_BYTES_PER_S = 0.5e9
"""Write speed of a node's disk until a save has been measured."""
ASSUMED_SAVE_S = 60.0
"""Least seconds that a save is expected to take until one has been measured."""


class SaveTime:
    """Expected seconds of a save, and the instant by which the last save of a job must begin."""

    def __init__(self, ctx: RunContext) -> None:
        self._margin = ctx.config.trainer.checkpoint.save_margin
        self._deadline = job_deadline(os.environ)
        measured = last_value(ctx.run_dir / METRICS_FILE, "ckpt/write_gbps")
        speed = ASSUMED_BYTES_PER_S
        if measured is not None:
            speed = measured * 1e9 * ctx.world.local_size
        rank_bytes = _checkpoint_bytes(ctx) // ctx.world.size
        expected_s = predicted_save_s(rank_bytes * ctx.world.local_size, bytes_per_s=speed)
        self.warnings = grace_warnings(
            ctx.config.trainer, expected_s, speed if measured is not None else None
        )
        """Lines for the user when a save may not fit into the grace period."""
        self.expected_s = expected_s if measured is not None else max(expected_s, ASSUMED_SAVE_S)

    def is_due(self, *, measured_s: float | None, step_s: float) -> bool:
        """Whether the job's time limit leaves no room for another step and a save.

        ``measured_s``: seconds of this attempt's last save; ``step_s``: of the last step.
        """
        if self._deadline is None:
            return False
        save_s = measured_s or self.expected_s
        latest = must_save_by(self._deadline, save_s=save_s, step_s=step_s, margin=self._margin)
        return time.time() >= latest


def grace_warnings(
    trainer: Trainer, expected_s: float, measured_bytes_per_s: float | None
) -> list[str]:
    """A warning when the last save of a preempted job may not fit into its grace period."""
    margin = trainer.checkpoint.save_margin
    needed_s = expected_s * margin
    if needed_s <= trainer.grace_period_s:
        return []
    verb = "is taken to need"
    if measured_bytes_per_s is not None:
        verb = f"at the {measured_bytes_per_s / 1e9:.2g} GB/s measured before needs"
    return [
        f"[WARNING] a checkpoint {verb} {needed_s:.0f} s (margin {margin:g} included), but "
        f"trainer.grace_period_s={trainer.grace_period_s:g}: a preempted job may lose its last "
        "steps. Raise the grace time (and hydra.launcher.signal_delay_s), or write to a faster "
        "disk."
    ]


def keep_best_hints(trainer: Trainer, metric: str | None, total_steps: int) -> list[str]:
    """A hint when few of the saved steps have the metric that ``keep_best`` compares."""
    save_freq = trainer.checkpoint.save_freq
    test_freq = trainer.test_freq
    compares_validations = metric is not None and metric.startswith("val/")
    if trainer.checkpoint.keep_best == 0 or not compares_validations:
        return []
    if not 0 < save_freq < total_steps or test_freq <= 0 or save_freq % test_freq == 0:
        return []
    return [
        f"[HINT] trainer.checkpoint.keep_best goes by {metric}, which only each "
        f"{math.lcm(save_freq, test_freq)}th step that is saved has: set "
        f"trainer.checkpoint.save_freq={save_freq} to a multiple of "
        f"trainer.test_freq={test_freq}."
    ]


def job_deadline(env: Mapping[str, str]) -> float | None:
    """The end of this Slurm job in seconds since the epoch, or None when Slurm does not say it."""
    if env.get("PLIMSOLL_SLURM") != "1":
        return None
    end = env.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def _checkpoint_bytes(ctx: RunContext) -> int:
    settings = ctx.engine.settings
    size = checkpoint_bytes(
        ctx.model.shape,
        precision="bf16" if settings.bf16 else "fp32",
        zero_stage=settings.zero_stage,
        reference=bool(reference_state(ctx)),
        adapters=ctx.engine.num_trained if ctx.model.has_adapters else 0,
    )
    if ctx.critic is not None:
        size += checkpoint_bytes(
            ctx.critic.model.shape.of_values(),
            precision="bf16" if settings.bf16 else "fp32",
            zero_stage=ctx.critic.engine.settings.zero_stage,
        )
    return size
