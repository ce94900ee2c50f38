"""What a checkpoint holds beside weights, optimizer and schedule: one line for each part of a run
that has a state.

Rollouts need no random state: their numbers come from (seed, step, prompt, sample) alone. Prompts
that were begun and not finished are kept with the tokens they have. A reference that moves is saved
as tensors beside the engine's (``trainer.run.reference``). Of weights that are frozen (LoRA) there
is a digest, in place of the weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.snapshot.parts import Parts
from trainer.models.adapters import adapters_state, require_same_base
from trainer.run.best_metric import Best
from trainer.run.build import Context
from trainer.tracking.wandb_run import Identity, keep_identity, stored_identity


def shared_parts(ctx: Context, best: Best, identity: RunIdentity) -> Parts:
    """The same on every rank: rank 0's are saved, and any number of ranks takes them back."""
    parts = Parts()
    parts.add("loader", ctx.loader.state_dict, ctx.loader.load_state_dict)
    if (rolling := ctx.rolling) is not None:
        prompts = rolling.prompts
        parts.add(
            "prompts",
            prompts.state_dict,
            lambda state: prompts.load_state_dict(state, ctx.train_data),
        )
    if ctx.loaded.frozen is not None:
        ours = adapters_state(ctx.config, ctx.loaded)
        parts.add("adapters", lambda: ours, lambda theirs: require_same_base(ours, theirs))
    parts.add("kl", ctx.kl.state_dict, ctx.kl.load_state_dict)
    parts.add("samples_seen", lambda: ctx.samples_seen, _setter(ctx, "samples_seen"))
    parts.add("productive_s", lambda: ctx.productive_s, _setter(ctx, "productive_s"))
    parts.add("budgets", lambda: ctx.budgets, lambda budgets: _lower(ctx, budgets))
    parts.add("best", best.state_dict, best.load_state_dict)
    parts.add("wandb", identity.state_dict, identity.load_state_dict)
    return parts


def rank_parts(ctx: Context) -> Parts:
    """Each rank's own: taken back when the run goes on with as many ranks."""
    parts = Parts()
    parts.add("cost", ctx.calibrator.state_dict, ctx.calibrator.load_state_dict)
    # Last of all: loading itself may draw random numbers.
    parts.add("python", random.getstate, random.setstate)
    parts.add("numpy", lambda: np.random.get_state(legacy=False), np.random.set_state)
    parts.add("torch", torch.get_rng_state, torch.set_rng_state)
    if (device := ctx.world.device).type == "cuda":
        parts.add(
            "cuda",
            lambda: torch.cuda.get_rng_state(device),
            lambda s: torch.cuda.set_rng_state(s, device),
        )
    return parts


class RunIdentity:
    """Who the run is for W&B. A run folder that was lost and fetched again goes on as the same W&B
    run.
    """

    def __init__(self, run_dir: Path, *, writes: bool) -> None:
        """``writes``: on the rank that logs."""
        self._run_dir, self._writes = run_dir, writes
        self.own = False
        """Whether the checkpoint is this run's: one of another run makes no other run of this
        one.
        """
        self.last_step = 0
        """The newest step that W&B and the record have."""

    @property
    def id(self) -> str | None:
        """W&B's id of the run; None without W&B."""
        found = stored_identity(self._run_dir)
        return None if found is None else found.id

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes."""
        found = stored_identity(self._run_dir)
        return {"identity": None if found is None else asdict(found), "last_step": self.last_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Write the identity down again where the run folder has none."""
        self.last_step = state["last_step"]
        if (
            self._writes
            and self.own
            and state["identity"] is not None
            and stored_identity(self._run_dir) is None
        ):
            keep_identity(self._run_dir, Identity(**state["identity"]))


def _setter(ctx: Context, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(ctx, name, value)


def _lower(ctx: Context, budgets: list[int] | None) -> None:
    """Budgets that ran out of memory in a world of this size; another one finds its own."""
    if budgets is not None and len(budgets) == ctx.world.size:
        ctx.lower_budgets(budgets)
