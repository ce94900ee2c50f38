"""What a run shows while it goes: banner, metrics, monitor lines, pictures, the reason it
stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from trainer.base.metrics_file import METRICS_FILE, by_step
from trainer.data import Batch
from trainer.experience.sampler import shares
from trainer.run.batching_metrics import StowageWatch
from trainer.run.build import Context
from trainer.run.checkpoints import Keeper
from trainer.run.validation import validate
from trainer.tracking import Tracker
from trainer.tracking.banner import banner
from trainer.tracking.health import Watermarks
from trainer.tracking.monitor import device_mesh_line
from trainer.tracking.perf import (
    memory_metrics,
    peak_flops,
    stowage_metrics,
    throughput_metrics,
    train_flops,
)
from trainer.update.optimizer_step import Update


class Show:
    """The tracker and what is derived for it. Only rank 0 writes; the monitor's line is every
    rank's own.
    """

    code = 1
    """Exit code to finish the W&B run with; a crash leaves it at 1."""

    def __init__(self, ctx: Context, keeper: Keeper) -> None:
        trainer, world = ctx.config.trainer, ctx.world
        self._ctx, self._keeper = ctx, keeper
        self.tracker = Tracker(
            ctx.run_dir,
            ctx.config.model_dump(),
            rank=world.rank,
            loggers=[trainer.logger] if isinstance(trainer.logger, str) else list(trainer.logger),
            project=trainer.project_name,
            name=trainer.experiment_name,
            group=None,
            total_steps=ctx.total_steps,
            steps_done=keeper.step,
            going_on=not trainer.val_only,
            watermarks=Watermarks(**trainer.watermarks.model_dump()),
            num_workers=ctx.config.data.num_workers,
        )
        self._stowed = StowageWatch(ctx, self._line)
        self.last_logged = keeper.step
        self._start()

    def verdict(self) -> list[str]:
        """The run in one line: validation reward before and after."""
        total = self._ctx.total_steps
        record = by_step(
            self._ctx.run_dir / METRICS_FILE
        )  # the whole run, earlier attempts included
        seen = [(step, float(m["val/reward"])) for step, m in record.items() if "val/reward" in m]
        if len(seen) < 2:
            return [f"Done: {total} steps"]
        (first, before), (last, after) = seen[0], seen[-1]
        return [
            f"Done: {total} steps. val/reward {before:.3f} (step {first}) -> {after:.3f} (step "
            f"{last})"
        ]

    def stopped(self, step: int, cause: str, code: int) -> int:
        """Say that the run was asked to stop and saved; returns ``code``."""
        self.last_save(step)
        self._line(
            f"Asked to stop ({cause}): saved at step {step}. The same command goes on from there.",
            rank=0,
        )
        return code

    def last_save(self, step: int) -> None:
        """Keep what the save at the end of this attempt took, and its goodput: no step follows that
        would log it.
        """
        self.tracker.record(step, self._keeper.metrics())

    def _start(self) -> None:
        ctx = self._ctx
        actor = ctx.config.actor_rollout_ref.actor
        sizes = {
            "parameters": f"{ctx.loaded.shape.params / 1e6:.1f}M",
            **(
                {} if ctx.loaded.frozen is None else {"trained": f"{ctx.engine.trained / 1e6:.2f}M"}
            ),
            "dp": ctx.world.size,
            "zero": actor.zero_stage,
            "dtype": "bf16" if ctx.engine.settings.bf16 else "fp32",
        }
        self._line(banner(ctx.info, ctx.run_dir, str(ctx.world.device), sizes), rank=0)
        self._line(
            device_mesh_line(shares(ctx.config.data.train_batch_size, ctx.world.size)), rank=0
        )
        for note in [*ctx.notes, *self._keeper.notes]:
            self._line(note, rank=0)

    def _line(self, text: str, rank: int | None = None) -> None:
        """One line: on the screen from rank 0, in the rank's own log otherwise."""
        if rank is None or rank == self._ctx.world.rank:
            self.tracker.message(text)

    def validation(self, step: int) -> dict[str, float]:
        """Validate and keep some generations."""
        metrics, rows = validate(self._ctx, step)
        self.tracker.log_generations(step, rows)
        return metrics

    def step_metrics(self, step: int, batch: Batch, updates: Sequence[Update]) -> dict[str, float]:
        """Speed, memory, stowage and times of an iteration; feeds the monitor and the pictures."""
        ctx, world = self._ctx, self._ctx.world
        plan = updates[-1].plan
        seconds = ctx.timers.seconds("step")
        reshard = ctx.timers.seconds("reshard") / seconds if seconds else 0.0
        ctx.productive_s += seconds
        shape, lengths = ctx.loaded.shape, batch.lengths.tolist()
        budgets = [int(b) for b in plan.budgets]
        epochs = ctx.config.actor_rollout_ref.actor.ppo_epochs
        every = [t for done in updates for rank in done.plan.tokens for t in rank]
        return {
            **plan.metrics(),
            **stowage_metrics(every, max(budgets)),
            **throughput_metrics(
                batch.num_tokens,
                seconds,
                world.size,
                flops=train_flops(
                    shape.params, shape.layers, shape.hidden, lengths, trained=ctx.engine.trained
                )
                * epochs,
                peak=peak_flops(world.device),
                update_s=ctx.timers.seconds("update_actor"),
            ),
            **world.max(memory_metrics(world.device)),
            **ctx.timers.end_step(),
            **({"timing/reshard_share": reshard} if ctx.is_rl else {}),
            **self._stowed.update(step, updates),
            "training/samples_seen": float(ctx.samples_seen),
            "training/epoch": float(ctx.loader.epoch),
        }

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step; ``last_logged`` is the newest one."""
        self.last_logged = step
        if metrics:
            self.tracker.log(step, {"training/global_step": step, **metrics})

    def finish_pictures(self, step: int) -> None:
        """Draw what is left."""
        self._stowed.finish(step)

    def __enter__(self) -> Show:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.tracker.close(self.code if error is None else 1)
