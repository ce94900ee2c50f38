"""Checkpoints of a run: what is saved, when, and how a run goes on from one."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from xxhash import xxh3_128_hexdigest

from trainer.base.errors import DISK_FULL, Failure, UserError
from trainer.base.metrics_file import METRICS_FILE, newest
from trainer.checkpoint import Checkpointer, CheckpointSettings
from trainer.checkpoint.resume import same_folder
from trainer.checkpoint.store.commit import step_dir
from trainer.checkpoint.store.retention import due, must_save_by, predicted_save_s
from trainer.config.frozen import MAY_CHANGE
from trainer.config.schema import Config
from trainer.config.schema.trainer import Trainer, better
from trainer.experience.weight_sync import LOST
from trainer.launch import new_attempt
from trainer.plan.memory import checkpoint_bytes
from trainer.run.best_metric import Best
from trainer.run.build import Context
from trainer.run.reference import reference_state
from trainer.run.state import RunIdentity, rank_parts, shared_parts
from trainer.run.validation import VALIDATION_METRICS
from trainer.tracking.banner import versions
from trainer.tracking.goodput import Clock
from trainer.worker import leave_note

CAUSES = ("", "TIME", "INT", "TERM", "USR2")
"""Why a run stops early, the one that Slurm gives as a warning last: of two causes the later one is
told.
"""
CLOSE_TIMEOUT_S = 600.0
ASSUMED_BYTES_PER_S = 0.5e9
"""Of a node's disk, until a save has been measured."""
ASSUMED_SAVE_S = 60.0
"""What a save is taken to last at least, until one has been measured."""
REWARD = "val/reward"
"""What ``keep_best`` goes by unless told otherwise, where there is a validation."""


class Keeper:
    """The run's checkpointer with the run's own state. ``step`` is where the run goes on from; 0 at
    its beginning.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        trainer = ctx.config.trainer
        keep = trainer.checkpoint
        metric = keep.best_metric or (REWARD if ctx.validates else None)
        self._best = Best(metric, keep.best_mode or better(metric or REWARD) or "max")
        self._identity = RunIdentity(ctx.run_dir, writes=ctx.world.is_main)
        self._shared, self._own = shared_parts(ctx, self._best, self._identity), rank_parts(ctx)
        self._seen: set[str] = set(VALIDATION_METRICS) if ctx.validates else set()
        attempt = attempt_number(ctx.run_dir, ctx.world.is_main)
        self._store = Checkpointer(
            ctx.run_dir,
            ctx.engine.ds,
            CheckpointSettings(
                keep_last=keep.keep_last,
                keep_every=keep.keep_every,
                keep_best=keep.keep_best,
                best_metric=self._best.metric,
                best=self._best.mode,
                async_save=keep.async_save,
                write_share=keep.write_share,
                resume_mode=trainer.resume_mode,
                resume_from_path=trainer.resume_from_path,
                going_on=not trainer.val_only,
                mirror=trainer.default_hdfs_dir,
                frozen=ctx.loaded.frozen is None,
            ),
            rank=ctx.world.rank,
            world_size=ctx.world.size,
            attempt=attempt,
            config_hash=config_hash(ctx.config),
            local_world_size=ctx.info.local_world_size,
            group=ctx.world.cpu_group if ctx.world.size > 1 else None,
            beside=reference_state(ctx),
        )
        ctx.engine.before_step = self._store.before_step
        self.notes = [] if metric is None else hints(trainer, metric, ctx.total_steps)
        self.step = self._restore()
        self._expected_save_s = self._check_grace()
        self._clock = Clock(ctx.run_dir, attempt, restored=self.step) if ctx.world.is_main else None
        self._saved_at = self._stepped_at = time.monotonic()
        self._step_s = 0.0
        self._put_off = False
        self._deadline = job_deadline(os.environ)

    def stop_requested(self, here: str | None) -> str | None:
        """Why the run has to stop at this step boundary, as soon as one rank was told to; None
        otherwise.
        """
        found = CAUSES.index(here) if here in CAUSES else len(CAUSES) - 1 if here else 0
        if not found and self._out_of_time():
            found = CAUSES.index("TIME")
        return CAUSES[self._ctx.world.any(found)] or None

    def after_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        last: bool,
        stop: str | None,
        sync: Callable[[], None],
    ) -> None:
        """Save when it is time. Before leaving (``last``, ``stop``) the save is waited for;
        ``sync`` makes the record durable first, so that no checkpoint is ahead of it. Raises
        UserError for a ``best_metric`` that no step has, and what ``LOST`` names, unless the run
        stops anyway, when what is drawn ahead fails.
        """
        keep = self._ctx.config.trainer.checkpoint
        now = time.monotonic()
        self._step_s, self._stepped_at = now - self._stepped_at, now
        self._seen |= metrics.keys()
        if self._ctx.world.is_main:  # the other ranks don't measure all of it
            self._best.require_known(self._seen)
        self._best.observe(step, metrics)
        minutes = keep.save_interval_minutes
        why = due(
            step,
            save_freq=keep.save_freq,
            seconds_since_last=now - self._saved_at,
            save_interval_s=None if minutes is None else minutes * 60,
            put_off=self._put_off,
            last=last,
            stop=stop is not None,
        )
        # Rank 0 decides: only one clock counts.
        if not self._ctx.world.any(int(why is not None and self._ctx.world.is_main)):
            return
        if self._ctx.rolling is not None:
            try:
                self._ctx.rolling.settle()
            except LOST:
                if stop is None:
                    raise  # what it drew ahead is the next attempt's again
        sync()
        leaving = last or stop is not None
        saved = self._save(step, metrics, blocking=leaving)
        if stop is not None and self._ctx.world.is_main:
            leave_note(
                self._ctx.run_dir,
                cause=stop,
                step=step,
                attempt=attempt_number(self._ctx.run_dir, True),
            )
        if leaving and not saved:
            raise not_saved(step, self._store.last_failure)

    def lost(
        self, step: int, why: Failure | UserError, *, sync: Callable[[], None]
    ) -> Failure | UserError:
        """Save ``step``, the last whole one, as the run can't go on; the error to leave with. All
        ranks call it.
        """
        kind = UserError if isinstance(why, UserError) else Failure
        if step == 0:
            return kind(f"{why}. No step was trained yet: the same command begins anew")
        sync()
        missing = not self._store.wait(CLOSE_TIMEOUT_S) or self._store.last_committed_step != step
        # Saving takes all ranks: one that has not heard of the commit must not be left alone with
        # it.
        saved = self._save(step, {}, blocking=True) if self._ctx.world.any(int(missing)) else True
        where = (
            f"Step {step} is saved"
            if saved
            else f"Step {step} could not be saved ({self._store.last_failure})"
        )
        return kind(f"{why}. {where}; the same command goes on from the last checkpoint")

    def metrics(self) -> dict[str, float]:
        """``ckpt/*``; on rank 0 also ``goodput/*``."""
        spent = {} if self._clock is None else self._clock.metrics(self._ctx.productive_s)
        return self._store.metrics() | spent

    @property
    def newest(self) -> Path | None:
        """The newest committed checkpoint of this attempt."""
        step = self._store.last_committed_step
        return None if step is None else step_dir(self._store.root, step)

    @property
    def best(self) -> tuple[Path, str] | None:
        """The kept checkpoint of the best step, and what makes it the best; None when that step was
        not saved.
        """
        step, folder = self._best.step, step_dir(self._store.root, self._best.step or 0)
        if (
            step is None
            or self._ctx.config.trainer.checkpoint.keep_best == 0
            or not folder.is_dir()
        ):
            return None
        return folder, f"{self._best.metric} {self._best.value:.4g}"

    def _save(self, step: int, metrics: Mapping[str, float], *, blocking: bool) -> bool:
        main = self._ctx.world.is_main
        self._identity.last_step = step
        if self._clock is not None:
            self._clock.note()
        saved = self._store.save(
            step,
            self._own.state_dict(),
            self._shared.state_dict() if main else {},
            self._best.of(metrics),
            blocking=blocking,
            about={"wandb_id": self._identity.id, **versions()} if main else None,
        )
        self._put_off = not saved
        if saved:
            self._saved_at = time.monotonic()
        return saved

    def _out_of_time(self) -> bool:
        if self._deadline is None:
            return False
        known = self._store.save_s or self._expected_save_s
        margin = self._ctx.config.trainer.checkpoint.save_margin
        return time.time() >= must_save_by(
            self._deadline, save_s=known, step_s=self._step_s, margin=margin
        )

    def _check_grace(self) -> float:
        """Say at start when the last save of a preempted job would hardly fit into its grace time.
        Returns the seconds that a save is expected to last.
        """
        trainer, world = self._ctx.config.trainer, self._ctx.world
        settings, local = self._ctx.engine.settings, self._ctx.info.local_world_size
        whole = checkpoint_bytes(
            self._ctx.loaded.shape,
            precision="bf16" if settings.bf16 else "fp32",
            zero_stage=settings.zero_stage,
            reference=bool(reference_state(self._ctx)),
            adapters=0 if self._ctx.loaded.frozen is None else self._ctx.engine.trained,
        )
        measured = newest(self._ctx.run_dir / METRICS_FILE, "ckpt/write_gbps")
        speed = ASSUMED_BYTES_PER_S if measured is None else measured * 1e9 * local
        expected = predicted_save_s(whole // world.size * local, bytes_per_s=speed)
        needed = expected * trainer.checkpoint.save_margin
        if needed > trainer.grace_period_s:
            how = (
                "is taken to need"
                if measured is None
                else f"at the {speed / 1e9:.2g} GB/s measured before needs"
            )
            self.notes.append(
                f"[WARNING] a checkpoint {how} {needed:.0f} s (margin "
                f"{trainer.checkpoint.save_margin:g} "
                f"included), but trainer.grace_period_s={trainer.grace_period_s:g}: a preempted "
                "job may lose its last "
                "steps. Raise the grace time (and hydra.launcher.signal_delay_s), or write to a "
                "faster disk."
            )
        return expected if measured is not None else max(expected, ASSUMED_SAVE_S)

    def _restore(self) -> int:
        found = self._store.restore()
        if found is None:
            return 0
        self.notes.append(f"Going on from {found.folder} (step {found.step})")
        self._identity.own = same_folder(found.folder.parent, self._store.root)
        missing = self._shared.load_state_dict(found.global_state)
        if found.rank_state is None:
            self.notes.append(
                f"{len(found.rank_states)} rank(s) wrote it, {self._ctx.world.size} go on: "
                f"{', '.join(self._own.names)} begin anew"
            )
        else:
            missing += self._own.load_state_dict(found.rank_state)
        if missing:
            self.notes.append(
                f"[WARNING] it was written by another version and lacks {', '.join(missing)}"
            )
        return found.step

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._store.close(CLOSE_TIMEOUT_S if error is None else 30.0)
        if self._clock is not None:
            self._clock.metrics(self._ctx.productive_s)
            self._clock.note()


def hints(trainer: Trainer, metric: str, total_steps: int) -> list[str]:
    """What of ``keep_best`` will not come about with these settings."""
    save, test = trainer.checkpoint.save_freq, trainer.test_freq
    if (
        trainer.checkpoint.keep_best == 0
        or not metric.startswith("val/")
        or not 0 < save < total_steps
    ):
        return []
    if test <= 0 or save % test == 0:
        return []
    return [
        f"[HINT] trainer.checkpoint.keep_best goes by {metric}, which only each "
        f"{math.lcm(save, test)}th step that is "
        f"saved has: set trainer.checkpoint.save_freq={save} to a multiple of "
        f"trainer.test_freq={test}."
    ]


def not_saved(step: int, why: str) -> Exception:
    """The error to leave with when the last save failed: a UserError for a disk that takes no more,
    or not from us.
    """
    text = f"step {step} is not saved: {why or 'the saves before it never ended'}"
    if any(os.strerror(number) in why for number in DISK_FULL):
        return UserError(
            f"{text}. Free space, then type the same command: it goes on from the last checkpoint"
        )
    if os.strerror(errno.EACCES) in why:
        return UserError(
            f"{text}. Have the folder made writable, then type the same command: it goes on from "
            "there"
        )
    return Failure(text)


def attempt_number(run_dir: Path, is_main: bool) -> int:
    """This attempt's number: what started the ranks chose it; a single rank run by hand chooses its
    own.
    """
    if "PLIMSOLL_ATTEMPT" not in os.environ:
        os.environ["PLIMSOLL_ATTEMPT"] = str(new_attempt(run_dir)[0]) if is_main else "1"
    return int(os.environ["PLIMSOLL_ATTEMPT"])


def config_hash(config: Config) -> str:
    """A digest of the settings that decide what is learnt: those that may not change when a run
    goes on.
    """
    values = config.model_dump(mode="json")
    for name in MAY_CHANGE:
        *path, key = name.split(".")
        section: Any = values
        for part in path:
            section = section[part]
        section.pop(key, None)
    return xxh3_128_hexdigest(json.dumps(values, sort_keys=True).encode())


def job_deadline(env: Mapping[str, str]) -> float | None:
    """When Slurm will end this job (seconds since the epoch), where it says so."""
    end = env.get("SLURM_JOB_END_TIME", "") if env.get("PLIMSOLL_SLURM") == "1" else ""
    return float(end) if end.isdigit() else None
