"""What a run reports while it goes: banner, metrics, monitor lines, pictures, why it stopped."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.metrics_file import METRICS_FILE, ReplacedSteps, by_step
from trainer.base.run_folder import upload_command
from trainer.experience.sampler import prompts_per_rank
from trainer.run.attempt import attempt_number
from trainer.run.batching_metrics import BatchingMetrics
from trainer.run.checkpoints import RunCheckpoints
from trainer.run.context import RunContext
from trainer.run.sample_files import write_samples
from trainer.run.step import TrainingStep
from trainer.run.validation import validate
from trainer.tracking import Tracker
from trainer.tracking.banner import banner
from trainer.tracking.monitor import device_mesh_line
from trainer.tracking.perf import (
    memory_metrics,
    micro_batch_metrics,
    peak_flops,
    throughput_metrics,
    train_flops,
)


class RunReporter:
    """The tracker and the metrics derived for it.

    Only rank 0 writes metrics; every rank writes monitor lines into its own log.
    """

    exit_code = 1
    """Exit code to finish the W&B run with; a crash leaves it at 1."""

    def __init__(self, ctx: RunContext, checkpoints: RunCheckpoints) -> None:
        """Raises UserError for an unknown logger or a run folder that can't be written."""
        self._ctx = ctx
        self._checkpoints = checkpoints
        self._tracker = Tracker.from_config(
            ctx.config,
            ctx.run_dir,
            rank=ctx.world.rank,
            total_steps=ctx.total_steps,
            steps_done=checkpoints.restored_step,
            attempt=attempt_number(ctx.run_dir, ctx.world.is_main),
        )
        self._batching = BatchingMetrics(ctx, self.message)
        self.last_logged = checkpoints.restored_step
        """The newest step whose metrics were logged."""
        self._failed_saves = 0.0
        self._report_start()

    def message(self, text: str) -> None:
        """Write a line: to the terminal on rank 0, to the rank's own log on the others."""
        self._tracker.message(text)

    def main_message(self, text: str | None) -> None:
        """Write a line on rank 0 only, if there is a text."""
        if text is not None and self._ctx.world.is_main:
            self.message(text)

    def sync(self) -> None:
        """Make ``metrics.jsonl`` durable."""
        self._tracker.sync()

    def validation(self, step: int) -> dict[str, float]:
        """Validate, keep some generations, and return the metrics. Collective."""
        validation = validate(self._ctx, step)
        self._tracker.log_generations(step, validation.generations)
        self._write_samples(self._ctx.config.trainer.validation_data_dir, step, validation.samples)
        return validation.metrics

    def _write_samples(
        self, folder: str | None, step: int, rows: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write responses where a folder is asked for. Collective."""
        if folder is not None:
            write_samples(Path(folder), step, rows, self._ctx.world, self.message)

    def step_metrics(self, step: int, result: TrainingStep) -> dict[str, float]:
        """Speed, memory, batching and times of a training step. Collective."""
        ctx = self._ctx
        self._write_samples(ctx.config.trainer.rollout_data_dir, step, result.samples)
        plans = [optimizer_step.plan for optimizer_step in result.optimizer_steps]
        tokens = [count for plan in plans for rank in plan.tokens for count in rank]
        seconds = ctx.timers.seconds("step")
        reshard_s = ctx.timers.seconds("reshard")
        metrics: dict[str, float] = {}
        if plans:  # none while the critic warms up
            metrics |= plans[-1].metrics()
            budget = max(int(budget) for budget in plans[-1].budgets)
            metrics |= micro_batch_metrics(tokens, budget)
        metrics |= self._throughput(result, seconds)
        metrics |= ctx.world.max(memory_metrics(ctx.world.device))
        metrics |= ctx.timers.end_step()
        if ctx.is_rl:
            metrics["timing/reshard_share"] = reshard_s / seconds if seconds else 0.0
        metrics |= self._batching.update(step, result.optimizer_steps)
        metrics["training/samples_seen"] = float(ctx.samples_seen)
        metrics["training/epoch"] = float(ctx.loader.epoch)
        return metrics

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record the metrics of a step."""
        self.last_logged = step
        if metrics:
            self._tracker.log(step, {"training/global_step": step, **metrics})
        self._report_failed_saves(metrics.get("ckpt/failed_in_a_row", 0.0))

    def report_rollback(self, step: int, text: str | None) -> None:
        """Tell of a rollback after ``step``, if there was one: here, in the metrics and as an alert
        of W&B.
        """
        if text is None:
            return
        self.main_message(text)
        self._tracker.alert("Rollback", text)
        self._tracker.record(step, {"training/rollbacks": float(self._checkpoints.rollbacks)})

    def _report_failed_saves(self, in_a_row: float) -> None:
        """Show each further save that failed: nobody reads the log of a run that goes on."""
        if in_a_row > self._failed_saves:
            newest = self._checkpoints.newest
            kept = "there is no checkpoint yet"
            if newest is not None:
                kept = f"a kill now would lose what came after {newest}"
            reason = self._checkpoints.last_failure
            self.main_message(f"[ERROR] {reason}. Failed in a row: {in_a_row:.0f}; {kept}.")
        self._failed_saves = in_a_row

    def log_last_save(self, step: int) -> None:
        """Record the time of the last save and the goodput: no later step would log them."""
        self._tracker.record(step, self._checkpoints.metrics())

    def report_stop(self, step: int, cause: str) -> None:
        """Report that the run was asked to stop and has saved."""
        rest = ""
        if self._ctx.unlogged is None:
            self.log_last_save(step)
        else:
            rest = " with the validation of that step"
        self.main_message(
            f"Asked to stop ({cause}): saved at step {step}. The same command goes on from "
            f"there{rest}."
        )

    def finish_pictures(self, step: int) -> None:
        """Draw the pictures of the last steps."""
        self._batching.finish(step)

    def summary(self) -> str:
        """The run in one line: validation reward before and after, earlier attempts included."""
        total = self._ctx.total_steps
        record = by_step(self._ctx.run_dir / METRICS_FILE)
        rewards = [
            (step, float(metrics["val/reward"]))
            for step, metrics in record.items()
            if "val/reward" in metrics
        ]
        if len(rewards) < 2:
            return f"Done: {total} steps"
        first_step, first = rewards[0]
        last_step, last = rewards[-1]
        return (
            f"Done: {total} steps. val/reward {first:.3f} (step {first_step}) -> {last:.3f} "
            f"(step {last_step})"
        )

    @property
    def wandb_location(self) -> str | None:
        """The W&B run's address, or its folder with the command that uploads it."""
        if self._tracker.wandb_url is not None:
            return self._tracker.wandb_url
        if self._tracker.wandb_folder is not None:
            command = shlex.join(upload_command(self._ctx.run_dir))
            return f"{self._tracker.wandb_folder}  (upload: {command})"
        return None

    def _report_start(self) -> None:
        ctx = self._ctx
        sizes: dict[str, object] = {"parameters": f"{ctx.model.shape.params / 1e6:.1f}M"}
        if ctx.model.has_adapters:
            sizes["trained"] = f"{ctx.engine.num_trained / 1e6:.2f}M"
        sizes["dp"] = ctx.world.size
        sizes["zero"] = ctx.config.actor_rollout_ref.actor.zero_stage
        sizes["dtype"] = "bf16" if ctx.engine.settings.bf16 else "fp32"
        text = banner(
            ctx.run_dir,
            world_size=ctx.world.size,
            local_size=ctx.world.local_size,
            device=str(ctx.world.device),
            sizes=sizes,
        )
        self.main_message(text)
        samples = prompts_per_rank(ctx.config.data.train_batch_size, ctx.world.size)
        self.main_message(device_mesh_line(samples))
        for note in [*ctx.notes, *self._checkpoints.notes]:
            self.main_message(note)
        replaced = self._tracker.replaced
        if replaced is not None and replaced.last > 0:
            self.main_message(replaced_note(replaced, self.last_logged))

    def _throughput(self, result: TrainingStep, seconds: float) -> dict[str, float]:
        ctx = self._ctx
        shape = ctx.model.shape
        lengths = result.batch.lengths.tolist()
        updated = len(result.optimizer_steps) > 0
        epoch_flops = train_flops(
            shape.params, shape.layers, shape.hidden, lengths, trained=ctx.engine.num_trained
        )
        return throughput_metrics(
            result.batch.num_tokens,
            seconds,
            ctx.world.size,
            flops=epoch_flops * ctx.config.actor_rollout_ref.actor.ppo_epochs if updated else None,
            peak=peak_flops(ctx.world.device),
            update_s=ctx.timers.seconds("update_actor"),
        )

    def __enter__(self) -> RunReporter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._tracker.close(self.exit_code if kind is None else 1)


def replaced_note(replaced: ReplacedSteps, restored: int) -> str:
    """What the user is told of steps that no checkpoint held. ``restored``: the step that the run
    goes on from, 0 when it begins anew.
    """
    kept = f"their lines are kept in {replaced.file}"
    if restored > 0:
        return (
            f"[WARNING] Steps {replaced.first} to {replaced.last} were taken before and no "
            f"checkpoint holds them: they are taken again after step {restored}; {kept}."
        )
    return (
        f"[WARNING] This run was ended at step {replaced.last}, before its first checkpoint: it "
        f"begins again at step 0; {kept}. trainer.checkpoint.save_interval_minutes and "
        "trainer.checkpoint.save_freq say how often it saves."
    )
