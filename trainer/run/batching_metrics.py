"""What is measured of the stowage while a run goes: the monitor's line, cost model, bucket speeds,
pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.batching import bucket_names, bucket_speeds
from trainer.batching.buckets import assign_buckets
from trainer.data import Batch
from trainer.run.build import Context
from trainer.tracking.monitor import DynamicBatchMonitor
from trainer.tracking.visualizer import DynamicBatchVisualizer
from trainer.update.optimizer_step import Update

PICTURES = "dynamic_batch_plots"
"""Folder of the run that holds the pictures."""


class StowageWatch:
    """Fed with every optimizer step of this rank.

    The calibrated cost model is reported, not planned with: a plan that followed the clock would
    change the order of sums, and a resumed run would no longer equal an uninterrupted one bit for
    bit.
    """

    def __init__(self, ctx: Context, write: Callable[[str], None]) -> None:
        trainer = ctx.config.trainer
        self._ctx = ctx
        self._monitor = DynamicBatchMonitor(ctx.world.rank, write, trainer.monitor_interval)
        draws = ctx.world.is_main and trainer.enable_monitor
        self._pictures = (
            DynamicBatchVisualizer(str(ctx.run_dir / PICTURES), trainer.plot_interval)
            if draws
            else None
        )

    def update(self, step: int, updates: Sequence[Update]) -> dict[str, float]:
        """``cost/*`` and ``speed/bucket_*`` of an iteration's optimizer steps."""
        rank, boundaries = self._ctx.world.rank, self._ctx.stowage.buckets
        seen: list[tuple[int, int, float]] = []  # bucket, tokens, seconds of each micro-batch
        for done in updates:
            plan, batch = done.plan, done.batch
            tokens, squares = plan.tokens[rank], plan.squares()[rank]
            self._monitor.update(tokens)
            for mine, held, squared, seconds in zip(
                plan.micro_batches[rank], tokens, squares, done.seconds, strict=False
            ):
                self._ctx.calibrator.add(held, squared, seconds)
                if boundaries and mine.size:
                    seen.append((self._bucket(batch, int(mine[0])), held, seconds))
        fit = self._ctx.calibrator.fit()
        if self._pictures is not None:
            for done in updates:
                self._pictures.update(
                    step,
                    done.plan,
                    boundaries=boundaries,
                    calibration=fit,
                    samples=self._ctx.calibrator.samples(),
                )
        metrics = {} if fit is None else fit.metrics(self._ctx.cost)
        return metrics | (_speeds(seen, boundaries) if boundaries else {})

    def finish(self, step: int) -> None:
        """Draw what has come together since the last pictures."""
        if self._pictures is not None:
            self._pictures.draw(
                step,
                boundaries=self._ctx.stowage.buckets,
                calibration=self._ctx.calibrator.fit(),
                samples=self._ctx.calibrator.samples(),
            )

    def _bucket(self, batch: Batch, sequence: int) -> int:
        by_prompt = self._ctx.stowage.bucket_by == "prompt"
        length = batch.rows["prompt_lengths"][sequence] if by_prompt else batch.lengths[sequence]
        return int(assign_buckets([int(length)], self._ctx.stowage.buckets or ())[0])


def _speeds(seen: Sequence[tuple[int, int, float]], boundaries: Sequence[int]) -> dict[str, float]:
    names = bucket_names(boundaries)
    speeds = bucket_speeds(
        [s[0] for s in seen], [s[1] for s in seen], [s[2] for s in seen], len(names)
    )
    return {
        f"speed/bucket_{name}": speed
        for name, speed in zip(names, speeds, strict=True)
        if speed == speed
    }
