"""Checkpoints of a run: what is saved, when, and how a run goes on from one."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from xxhash import xxh3_128_hexdigest

from trainer.checkpoint import Checkpointer, CheckpointSettings, Restored
from trainer.checkpoint.policy import due, must_save_by, predicted_save_s
from trainer.config.frozen import MAY_CHANGE
from trainer.config.schema import Config
from trainer.launch import new_attempt
from trainer.plan.memory import checkpoint_bytes
from trainer.steps.context import Context
from trainer.worker import leave_note

CAUSES = ("", "TIME", "INT", "TERM", "USR2")
"""Why a run stops early, the one that Slurm gives as a warning last: of two causes the later one is told."""
CLOSE_TIMEOUT_S = 600.0
ASSUMED_BYTES_PER_S = 0.5e9
"""Of a node's disk, until a save has been measured."""
ASSUMED_SAVE_S = 60.0
"""What a save is taken to last until one has been measured."""


class Keeper:
    """The run's checkpointer with the run's own state. ``step`` is where the run goes on from; 0 at its beginning."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        trainer = ctx.config.trainer
        keep = trainer.checkpoint
        self._store = Checkpointer(
            ctx.run_dir,
            ctx.engine.ds,
            CheckpointSettings(
                keep_last=keep.keep_last,
                keep_every=keep.keep_every,
                keep_best=keep.keep_best,
                async_save=keep.async_save,
                resume_mode=trainer.resume_mode,
                resume_from_path=trainer.resume_from_path,
                mirror=trainer.default_hdfs_dir,
            ),
            rank=ctx.world.rank,
            world_size=ctx.world.size,
            attempt=attempt_number(ctx.run_dir, ctx.world.is_main),
            config_hash=config_hash(ctx.config),
            local_world_size=ctx.info.local_world_size,
            group=ctx.world.cpu_group if ctx.world.size > 1 else None,
        )
        ctx.engine.before_step = self._store.before_step
        self.notes: list[str] = []
        self.step = self._restore()
        self._check_grace()
        self._saved_at = self._stepped_at = time.monotonic()
        self._step_s = 0.0
        self._deadline = job_deadline(os.environ)

    def stop_requested(self, here: str | None) -> str | None:
        """Why the run has to stop at this step boundary, as soon as one rank was told to; None otherwise."""
        found = CAUSES.index(here) if here in CAUSES else len(CAUSES) - 1 if here else 0
        if not found and self._out_of_time():
            found = CAUSES.index("TIME")
        return CAUSES[self._ctx.world.any(found)] or None

    def after_step(
        self, step: int, metrics: Mapping[str, float], *, last: bool, stop: str | None, sync: Callable[[], None]
    ) -> None:
        """Save when it is time. Before leaving (``last``, ``stop``) the save is waited for; ``sync`` makes the record
        durable first, so that no checkpoint is ahead of it.
        """
        keep = self._ctx.config.trainer.checkpoint
        now = time.monotonic()
        self._step_s, self._stepped_at = now - self._stepped_at, now
        minutes = keep.save_interval_minutes
        why = due(
            step,
            save_freq=keep.save_freq,
            seconds_since_last=now - self._saved_at,
            save_interval_s=None if minutes is None else minutes * 60,
            last=last,
            stop=stop is not None,
        )
        # Rank 0 decides: only one clock counts.
        if not self._ctx.world.any(int(why is not None and self._ctx.world.is_main)):
            return
        sync()
        leaving = last or stop is not None
        saved = self._store.save(
            step, self._rank_state(), self._global_state(), metrics.get("val/reward"), blocking=leaving
        )
        if saved:
            self._saved_at = now
        if stop is not None and self._ctx.world.is_main:
            leave_note(self._ctx.run_dir, cause=stop, step=step, attempt=self._attempt)
        if leaving and not saved:
            raise RuntimeError(
                f"the checkpoint of step {step} could not be written: {self.metrics()}; see the log above"
            )

    def metrics(self) -> dict[str, float]:
        """``ckpt/*``."""
        return self._store.metrics()

    @property
    def newest(self) -> Path | None:
        """The newest committed checkpoint of this attempt."""
        step = int(self._store.metrics()["ckpt/last_committed_step"])
        return self._store.root / f"step_{step}" if step >= 0 else None

    def _out_of_time(self) -> bool:
        if self._deadline is None:
            return False
        known = self._store.metrics().get("ckpt/write_s", ASSUMED_SAVE_S)
        margin = self._ctx.config.trainer.checkpoint.save_margin
        return time.time() >= must_save_by(self._deadline, save_s=known, step_s=self._step_s, margin=margin)

    def _check_grace(self) -> None:
        """Say at start when the last save of a preempted job would hardly fit into its grace time."""
        trainer, world = self._ctx.config.trainer, self._ctx.world
        settings = self._ctx.engine.settings
        whole = checkpoint_bytes(
            self._ctx.loaded.shape, precision="bf16" if settings.bf16 else "fp32", zero_stage=settings.zero_stage
        )
        share = whole // world.size * self._ctx.info.local_world_size
        needed = predicted_save_s(share, bytes_per_s=ASSUMED_BYTES_PER_S) * trainer.checkpoint.save_margin
        if needed > trainer.grace_period_s:
            self.notes.append(
                f"[WARNING] a checkpoint is taken to need {needed:.0f} s (margin {trainer.checkpoint.save_margin:g} "
                f"included), but trainer.grace_period_s={trainer.grace_period_s:g}: a preempted job may lose its last "
                "steps. Raise the grace time (and hydra.launcher.signal_delay_s), or write to a faster disk."
            )

    def _restore(self) -> int:
        found = self._store.restore()
        if found is None:
            return 0
        self._apply(found)
        self.notes.append(f"Going on from {found.folder} (step {found.step})")
        return found.step

    def _rank_state(self) -> dict[str, Any]:
        numpy_state = np.random.get_state(legacy=False)
        state = {"python": random.getstate(), "numpy": numpy_state, "torch": torch.get_rng_state()}
        if self._ctx.world.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._ctx.world.device)
        return state

    def _global_state(self) -> dict[str, Any]:
        ctx = self._ctx
        return {
            "loader": ctx.loader.state_dict(),
            "kl": ctx.kl.state_dict(),
            "samples_seen": ctx.samples_seen,
            "budgets": ctx.budgets,
        }

    def _apply(self, found: Restored) -> None:
        ctx, state = self._ctx, found.global_state
        ctx.loader.load_state_dict(state["loader"])
        ctx.kl.load_state_dict(state["kl"])
        ctx.samples_seen = state["samples_seen"]
        if state["budgets"] is not None and len(state["budgets"]) == ctx.world.size:
            ctx.lower_budgets(state["budgets"])
        if found.rank_state is None:
            self.notes.append(f"{len(found.rank_states)} rank(s) wrote it, {ctx.world.size} go on")
            return
        # Last of all: loading itself may draw random numbers.
        random.setstate(found.rank_state["python"])
        np.random.set_state(found.rank_state["numpy"])
        torch.set_rng_state(found.rank_state["torch"])
        if "cuda" in found.rank_state and ctx.world.device.type == "cuda":
            torch.cuda.set_rng_state(found.rank_state["cuda"], ctx.world.device)

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._store.close(CLOSE_TIMEOUT_S if error is None else 30.0)

    @property
    def _attempt(self) -> int:
        return int(os.environ["PLIMSOLL_ATTEMPT"])


def attempt_number(run_dir: Path, is_main: bool) -> int:
    """This attempt's number: what started the ranks chose it; a single rank run by hand chooses its own."""
    if "PLIMSOLL_ATTEMPT" not in os.environ:
        os.environ["PLIMSOLL_ATTEMPT"] = str(new_attempt(run_dir)[0]) if is_main else "1"
    return int(os.environ["PLIMSOLL_ATTEMPT"])


def config_hash(config: Config) -> str:
    """A digest of the settings that decide what is learnt: those that may not change when a run goes on."""
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
