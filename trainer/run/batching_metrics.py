"""What is measured of the micro-batches of a run: monitor lines, cost model, bucket speeds,
pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from trainer.batching import bucket_names, bucket_speeds
from trainer.batching.buckets import assign_buckets
from trainer.data import Batch
from trainer.run.context import RunContext
from trainer.tracking.monitor import DynamicBatchMonitor
from trainer.tracking.optional_output import optional_output
from trainer.tracking.visualizer import DynamicBatchVisualizer
from trainer.update.optimizer_step import OptimizerStep

PLOT_FOLDER = "dynamic_batch_plots"
"""Folder in the run folder that holds the pictures."""


class BatchingMetrics:
    """Collects the plans and times of every optimizer step of this rank.

    The calibrated cost model is reported, not planned with: a plan that depended on measured times
    would change the order of sums, and a resumed run would no longer equal an uninterrupted one bit
    for bit.
    """

    def __init__(self, ctx: RunContext, write: Callable[[str], None]) -> None:
        """``write`` takes the monitor's lines."""
        trainer = ctx.config.trainer
        self._ctx = ctx
        self._write = write
        self._monitor = DynamicBatchMonitor(ctx.world.rank, write, trainer.monitor_interval)
        self._visualizer: DynamicBatchVisualizer | None = None
        if ctx.world.is_main and trainer.enable_monitor:
            folder = str(ctx.run_dir / PLOT_FOLDER)
            self._visualizer = DynamicBatchVisualizer(folder, trainer.plot_interval)

    def update(self, step: int, optimizer_steps: Sequence[OptimizerStep]) -> dict[str, float]:
        """``cost/*`` and ``speed/bucket_*`` of a training step."""
        boundaries = self._ctx.update_pass.buckets
        bucket_times: list[tuple[int, int, float]] = []
        for optimizer_step in optimizer_steps:
            bucket_times += self._observe(optimizer_step)
        fit = self._ctx.calibrator.fit()
        if self._visualizer is not None:
            for optimizer_step in optimizer_steps:
                with optional_output(f"{PLOT_FOLDER}/", self._write):
                    self._visualizer.update(
                        step,
                        optimizer_step.plan,
                        boundaries=boundaries,
                        calibration=fit,
                        samples=self._ctx.calibrator.samples(),
                    )
        metrics = {} if fit is None else fit.metrics(self._ctx.cost_model)
        if boundaries:
            metrics |= _speeds(bucket_times, boundaries)
        return metrics

    def finish(self, step: int) -> None:
        """Draw the pictures of the steps since the last ones."""
        if self._visualizer is not None:
            with optional_output(f"{PLOT_FOLDER}/", self._write):
                self._visualizer.draw(
                    step,
                    boundaries=self._ctx.update_pass.buckets,
                    calibration=self._ctx.calibrator.fit(),
                    samples=self._ctx.calibrator.samples(),
                )

    def _observe(self, optimizer_step: OptimizerStep) -> list[tuple[int, int, float]]:
        """Feed monitor and calibrator. Returns (bucket, tokens, seconds) of each micro-batch."""
        rank = self._ctx.world.rank
        plan = optimizer_step.plan
        tokens = plan.tokens[rank]
        squares = plan.squares()[rank]
        self._monitor.update(tokens)
        bucket_times = []
        rows = zip(plan.micro_batches[rank], tokens, squares, optimizer_step.seconds, strict=False)
        for indices, token_count, square_sum, seconds in rows:
            self._ctx.calibrator.add(token_count, square_sum, seconds)
            if self._ctx.update_pass.buckets and indices.size:
                bucket = self._bucket(optimizer_step.batch, int(indices[0]))
                bucket_times.append((bucket, token_count, seconds))
        return bucket_times

    def _bucket(self, batch: Batch, sequence: int) -> int:
        config = self._ctx.update_pass
        by_prompt = config.bucket_by == "prompt"
        lengths = batch.rows["prompt_lengths"] if by_prompt else batch.lengths
        return int(assign_buckets([int(lengths[sequence])], config.buckets or ())[0])


def _speeds(
    bucket_times: Sequence[tuple[int, int, float]], boundaries: Sequence[int]
) -> dict[str, float]:
    """``speed/bucket_NAME`` in tokens per second, of the buckets that had tokens."""
    names = bucket_names(boundaries)
    speeds = bucket_speeds(
        [bucket for bucket, _, _ in bucket_times],
        [tokens for _, tokens, _ in bucket_times],
        [seconds for _, _, seconds in bucket_times],
        len(names),
    )
    return {
        f"speed/bucket_{name}": speed
        for name, speed in zip(names, speeds, strict=True)
        if not math.isnan(speed)
    }
