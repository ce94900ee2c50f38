"""Checkpoints of a run: when a step is saved, what is saved, and how a run resumes from one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trainer.base import rank_records, signals
from trainer.base.errors import EXIT_REQUEUE, Failure, UserError
from trainer.base.full_disk import POLL_S, WAIT_S
from trainer.base.metrics_file import METRICS_FILE, last_value
from trainer.base.signals import StopRequested
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.resume import COMMITTED_METRIC, is_same_folder
from trainer.checkpoint.schedule import save_reason
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store.catalog import healthy_before
from trainer.checkpoint.store.layout import step_dir
from trainer.checkpoint.store.room import is_full
from trainer.config.schema.trainer import default_best_mode
from trainer.experience.weight_sync import ENDS_THE_RUN
from trainer.run.attempt import attempt_number, config_hash
from trainer.run.best_metric import BestMetric
from trainer.run.context import RunContext
from trainer.run.critic import critic_engines
from trainer.run.not_saved import not_saved
from trainer.run.policy_update import about_run, lr_notes
from trainer.run.reference import reference_state
from trainer.run.rollback import RollbackRule, require_metric, roll_back
from trainer.run.save_interval import AutoInterval
from trainer.run.save_time import SaveTime, keep_best_hints
from trainer.run.skipped_steps import SkippedSteps
from trainer.run.state import RunIdentity, global_state, rank_state
from trainer.run.validation import VALIDATION_METRICS, validation_may_give
from trainer.tracking.goodput import GoodputClock

log = logging.getLogger(__name__)
STOP_CAUSES = ("", "TIME", *signals.CAUSES)
"""Causes of an early stop. Of two causes on different ranks the later in this order is reported;
USR2 is what Slurm sends as a warning.
"""
MAX_PAUSE_S = 30.0
"""Longest pause between two tries of the last save."""
CLOSE_TIMEOUT_S = 600.0
CLOSE_AFTER_ERROR_S = 30.0
REWARD = "val/reward"
"""The default metric of ``keep_best`` in a run that validates."""


class RunCheckpoints:
    """A run's checkpointer together with the run's own state. Restores on construction.

    ``restored_step`` is the step that the run resumes from, 0 for a new run. All ranks call its
    methods together.
    """

    def __init__(self, ctx: RunContext) -> None:
        """Raises UserError when the run folder's checkpoints do not belong to this run."""
        trainer = ctx.config.trainer
        checkpoint = trainer.checkpoint
        metric = checkpoint.best_metric or (REWARD if ctx.validates else None)
        attempt = attempt_number(ctx.run_dir, ctx.world.is_main)
        self._ctx = ctx
        self._best = BestMetric(
            metric, checkpoint.best_mode or default_best_mode(metric or REWARD) or "max"
        )
        self._identity = RunIdentity(ctx.run_dir, writes=ctx.world.is_main)
        self._global_state = global_state(ctx, self._best, self._identity)
        require_metric(trainer.rollback, metric)
        self._rollback = RollbackRule(trainer.rollback, self._best)
        self._global_state.add(
            "rollback",
            self._rollback.state_dict,
            self._rollback.load_state_dict,
            optional=True,
        )
        self._rank_state = rank_state(ctx)
        self._metric_names: set[str] = set(VALIDATION_METRICS) if ctx.validates else set()
        self._checkpointer = self._make_checkpointer(attempt)
        for engine in (ctx.engine, *critic_engines(ctx.critic).values()):
            engine.before_step = self._checkpointer.before_step
        self.notes = keep_best_hints(trainer, metric, ctx.total_steps)
        """Lines for the user at the start."""
        self.restored_step = self._restore()
        self._save_time = SaveTime(ctx)
        self.notes += self._save_time.warnings
        self._interval = AutoInterval.from_run(ctx.run_dir, write_share=checkpoint.write_share)
        self._skipped = SkippedSteps(trainer.max_skipped_steps)
        self._clock: GoodputClock | None = None
        if ctx.world.is_main:
            self._clock = GoodputClock(ctx.run_dir, attempt, restored=self.restored_step)
        self._last_save_at = time.monotonic()
        self._last_step_at = self._last_save_at
        self._step_s = 0.0
        self._postponed = False

    def stop_requested(self, signal_name: str | None) -> str | None:
        """The cause (``STOP_CAUSES``) for which the run has to stop after this step, or None.

        ``signal_name``: the signal that this rank received, if any. One rank's request stops all.
        """
        cause = STOP_CAUSES.index(signal_name or "")
        if cause == 0:
            measured_s = self._checkpointer.save_s
            if self._save_time.is_due(measured_s=measured_s, step_s=self._step_s):
                cause = STOP_CAUSES.index("TIME")
        return STOP_CAUSES[self._ctx.world.any(cause)] or None

    def after_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        last: bool,
        stop: str | None,
        sync: Callable[[], None],
    ) -> None:
        """Save ``step`` when a save is due. A save before leaving (``last`` or ``stop``) blocks.

        ``sync`` makes ``metrics.jsonl`` durable first, so that no checkpoint is ahead of it. Raises
        UserError for a ``best_metric`` that no step has and for too many steps in a row whose
        gradients are not finite, and what ``ENDS_THE_RUN`` names when rollouts drawn ahead fail,
        unless the run stops anyway.
        """
        now = time.monotonic()
        self._step_s = now - self._last_step_at
        self._last_step_at = now
        self.observe(step, metrics)
        self._skipped.observe(step, metrics)
        if self._skipped.reached_limit and stop is None:
            earlier = healthy_before(self._checkpointer.root, self._skipped.first or step)
            raise self._skipped.error(self._ctx.config, earlier)
        is_due = self._is_due(
            step, seconds_since_last=now - self._last_save_at, last=last, stop=stop
        )
        # Rank 0 decides: only one clock counts.
        if not self._ctx.world.any(int(is_due and self._ctx.world.is_main)):
            return
        if self._ctx.collector is not None:
            try:
                self._ctx.collector.drain()
            except (*ENDS_THE_RUN, StopRequested):
                if stop is None:
                    raise  # otherwise the next attempt draws the same rollouts again
        sync()
        leaving = last or stop is not None
        saved = self._save(step, metrics, blocking=leaving)
        if leaving and not saved:
            saved = self._save_when_there_is_room(step, metrics, stop=stop is not None)
        if leaving and not saved:
            raise not_saved(step, self._checkpointer.last_failure)
        if stop is not None:
            self._record_stop(step, stop)

    def _record_stop(self, step: int, cause: str) -> None:
        """Write this rank's end record at once: what comes after may outlast the grace time."""
        folder = rank_records.attempt_folder(self._ctx.run_dir)
        if folder is not None:
            rank_records.write_end(
                folder,
                self._ctx.world.rank,
                kind=rank_records.STOPPED,
                exit_code=EXIT_REQUEUE,
                step=step,
                stop=cause,
            )

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the metrics of ``step`` with the best so far.

        Raises UserError for a ``best_metric`` that no step has.
        """
        self._metric_names |= metrics.keys()
        is_to_come = validation_may_give(self._best.metric, self._metric_names)
        if self._ctx.world.is_main and not is_to_come:  # other ranks lack some of the metrics
            self._best.require_known(self._metric_names)
        self._best.observe(step, metrics)
        self._rollback.observe(step, metrics)

    def roll_back(self, step: int, metrics: Mapping[str, float], *, last: bool) -> str | None:
        """Go back to the best checkpoint's weights if the metrics of ``step`` make that due; what
        is told of it, or None. Nothing follows the ``last`` step. Collective.

        Raises UserError when the metric falls once more after ``max_rollbacks``.
        """
        self.observe(step, metrics)
        rule = self._rollback
        # Rank 0 decides: other ranks may lack the metric.
        is_due = rule.is_due and not last and self._ctx.world.is_main
        if not self._ctx.world.any(int(is_due)):
            return None
        if rule.is_used_up:
            raise rule.error(step, step_dir(self._checkpointer.root, self._best.step or 0))
        return roll_back(self._ctx, self._checkpointer, rule, step)

    @property
    def rollbacks(self) -> int:
        """Rollbacks of this run so far."""
        return self._rollback.count

    def save_stopped(
        self, step: int, cause: str, metrics: Mapping[str, float], *, sync: Callable[[], None]
    ) -> None:
        """Save ``step``, the last whole one with ``metrics``, of a run that leaves the next one.

        Nothing is saved when that step is committed already. Collective. Raises as ``after_step``
        does when the save fails.
        """
        sync()
        self._skipped.observe(step, metrics)
        saved = self._save_if_missing(step, metrics)
        if not saved:
            saved = self._save_when_there_is_room(step, metrics, stop=True)
        if not saved:
            raise not_saved(step, self._checkpointer.last_failure)
        self._record_stop(step, cause)

    def save_lost_run(
        self, step: int, error: Failure | UserError, *, sync: Callable[[], None]
    ) -> Failure | UserError:
        """Save ``step``, the last whole one, of a run that can't go on.

        Returns the error to leave with. Collective.
        """
        kind = UserError if isinstance(error, UserError) else Failure
        if step == 0:
            return kind(f"{error}. No step was trained yet: the same command begins anew")
        sync()
        saved = self._save_if_missing(step, {})
        outcome = f"Step {step} is saved"
        if not saved:
            outcome = f"Step {step} could not be saved ({self._checkpointer.last_failure})"
        return kind(f"{error}. {outcome}; the same command goes on from the last checkpoint")

    def metrics(self) -> dict[str, float]:
        """``ckpt/*``; on rank 0 also ``goodput/*``."""
        metrics = dict(self._checkpointer.metrics())
        if self._clock is not None:
            metrics |= self._clock.metrics(self._ctx.productive_s)
        return metrics

    @property
    def save_s(self) -> float:
        """Seconds of this attempt's last save, or those that one is expected to take."""
        return self._checkpointer.save_s or self._save_time.expected_s

    @property
    def last_failure(self) -> str:
        """Message of the last save that failed; empty before the first."""
        return self._checkpointer.last_failure

    @property
    def newest(self) -> Path | None:
        """The newest committed checkpoint of this attempt."""
        step = self._checkpointer.last_committed_step
        return None if step is None else step_dir(self._checkpointer.root, step)

    @property
    def best(self) -> tuple[Path, str] | None:
        """The kept checkpoint of the best step with its metric as text; None if it isn't saved."""
        step = self._best.step
        if step is None or self._ctx.config.trainer.checkpoint.keep_best == 0:
            return None
        folder = step_dir(self._checkpointer.root, step)
        if not folder.is_dir():
            return None
        return folder, f"{self._best.metric} {self._best.value:.4g}"

    def _make_checkpointer(self, attempt: int) -> Checkpointer:
        ctx = self._ctx
        settings = CheckpointSettings.from_config(
            ctx.config.trainer,
            best_metric=self._best.metric,
            best_mode=self._best.mode,
            include_untrained=not ctx.model.has_adapters,
        )
        return Checkpointer(
            ctx.run_dir,
            ctx.engine.ds,
            settings,
            ctx.world,
            attempt=attempt,
            config_hash=config_hash(ctx.config),
            extra_tensors=reference_state(ctx),
            further_engines={name: e.ds for name, e in critic_engines(ctx.critic).items()},
        )

    def _is_due(
        self, step: int, *, seconds_since_last: float, last: bool, stop: str | None
    ) -> bool:
        checkpoint = self._ctx.config.trainer.checkpoint
        minutes = checkpoint.save_interval_minutes
        interval_s: float | None = None
        if minutes == "auto":
            interval_s = self._interval.seconds(self.save_s)
        elif minutes is not None:
            interval_s = minutes * 60
        reason = save_reason(
            step,
            save_freq=checkpoint.save_freq,
            seconds_since_last=seconds_since_last,
            save_interval_s=interval_s,
            postponed=self._postponed,
            last=last,
            stop=stop is not None,
        )
        wanted_by_rollback = self._rollback.section.enable and step in (
            self._best.step,
            self._rollback.last_step,
        )
        return reason is not None or wanted_by_rollback

    def _save(self, step: int, metrics: Mapping[str, float], *, blocking: bool) -> bool:
        is_main = self._ctx.world.is_main
        self._identity.last_step = step
        if self._clock is not None:
            self._clock.save()
        saved = self._checkpointer.save(
            step,
            self._rank_state.state_dict(),
            self._global_state.state_dict() if is_main else {},
            # After a rollback the weights aren't those that the metric was measured with.
            None if step == self._rollback.last_step else self._best.value_in(metrics),
            blocking=blocking,
            healthy=self._skipped.in_a_row == 0,
            about={"wandb_id": self._identity.id, **about_run(self._ctx)} if is_main else None,
        )
        self._postponed = not saved
        if saved:
            self._last_save_at = time.monotonic()
        return saved

    def _save_if_missing(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Save ``step`` unless its save is committed. Returns whether it is saved. Collective."""
        ended = self._checkpointer.wait(CLOSE_TIMEOUT_S)
        missing = not ended or self._checkpointer.last_committed_step != step
        # Saving takes all ranks: one that has not heard of the commit must not be left alone.
        if self._ctx.world.any(int(missing)):
            return self._save(step, metrics, blocking=True)
        return True

    def _save_when_there_is_room(
        self, step: int, metrics: Mapping[str, float], *, stop: bool
    ) -> bool:
        """Try a failed last save again while the disk is full, for a bounded time. Collective."""
        wait_s = WAIT_S
        if stop:
            wait_s = self._ctx.config.trainer.grace_period_s / 2
        deadline = time.monotonic() + wait_s
        world = self._ctx.world
        pause_s = POLL_S
        while True:
            may_pass = is_full(self._checkpointer.last_failure) and time.monotonic() < deadline
            if not world.any(int(may_pass and world.is_main)):
                return False
            left_s = deadline - time.monotonic()
            log.warning("the save of step %d is tried again for another %.0f s", step, left_s)
            time.sleep(min(pause_s, max(0.0, left_s)))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            if self._save(step, metrics, blocking=True):
                return True

    def _restore(self) -> int:
        """Load the checkpoint to resume from; its step, or 0."""
        restored = self._checkpointer.restore()
        if restored is None:
            return 0
        self.notes.append(f"Going on from {restored.folder} (step {restored.step})")
        committed = last_value(self._ctx.run_dir / METRICS_FILE, COMMITTED_METRIC)
        if committed is not None and committed > restored.step:
            self.notes.append(
                f"[WARNING] {METRICS_FILE} says that step {committed:.0f} was committed: the "
                "checkpoints after this one are damaged, set aside or gone"
            )
        self._identity.same_run = is_same_folder(restored.folder.parent, self._checkpointer.root)
        missing = self._global_state.load_state_dict(restored.global_state)
        if restored.rank_state is None:
            self.notes.append(
                f"{len(restored.rank_states)} rank(s) wrote it, {self._ctx.world.size} go on: "
                f"{', '.join(self._rank_state.names)} begin anew"
            )
        else:
            missing += self._rank_state.load_state_dict(restored.rank_state)
        if missing:
            self.notes.append(
                f"[WARNING] it was written by another version and lacks {', '.join(missing)}"
            )
        self.notes += lr_notes(self._ctx, restored.step, restored.manifest.about)
        return restored.step

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._checkpointer.close(CLOSE_TIMEOUT_S if kind is None else CLOSE_AFTER_ERROR_S)
        if self._clock is not None:
            self._clock.metrics(self._ctx.productive_s)
            self._clock.save()
