"""What a checkpoint holds besides weights and optimizer: one line per component with state.

Rollouts need no random state: their numbers come from (seed, step, prompt, sample) alone. Prompts
that were begun and not finished are kept with the tokens they have. A reference that moves is saved
as tensors beside the engine's (``trainer.run.reference``). The untrained base weights of LoRA are
represented by a digest.

The names given to ``add`` stand in checkpoints on disk and never change.
"""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.snapshot.state_registry import StateRegistry
from trainer.models.adapters import adapters_state, require_same_base
from trainer.run.best_metric import BestMetric
from trainer.run.context import RunContext
from trainer.run.critic import Critic
from trainer.tracking.wandb_run import WandbIdentity, load_identity, save_identity


def global_state(ctx: RunContext, best: BestMetric, identity: RunIdentity) -> StateRegistry:
    """State that is the same on every rank: rank 0's is saved, any number of ranks restores it."""
    state = StateRegistry()
    state.add("loader", ctx.loader.state_dict, ctx.loader.load_state_dict)
    if ctx.collector is not None:
        prompts = ctx.collector.prompts
        state.add(
            "prompts",
            prompts.state_dict,
            lambda saved: prompts.load_state_dict(saved, ctx.train_data),
        )
    if ctx.model.has_adapters:
        current = adapters_state(ctx.config, ctx.model)
        state.add("adapters", lambda: current, lambda saved: require_same_base(current, saved))
    state.add("kl", ctx.kl_controller.state_dict, ctx.kl_controller.load_state_dict)
    _add_counter(state, ctx, "samples_seen")
    _add_counter(state, ctx, "productive_s")
    state.add(
        "unlogged",
        lambda: ctx.unlogged,
        lambda saved: setattr(ctx, "unlogged", saved),
        optional=True,
    )
    state.add(
        "budgets", lambda: ctx.lowered_budgets, lambda saved: _restore_budgets(ctx, ctx, saved)
    )
    critic = ctx.critic
    if critic is not None:
        state.add(
            "critic_budgets",
            lambda: critic.lowered_budgets,
            lambda saved: _restore_budgets(ctx, critic, saved),
        )
    state.add("best", best.state_dict, best.load_state_dict)
    state.add("wandb", identity.state_dict, identity.load_state_dict)
    return state


def rank_state(ctx: RunContext) -> StateRegistry:
    """State of each rank: restored when the run resumes with the same number of ranks."""
    state = StateRegistry()
    state.add("cost", ctx.calibrator.state_dict, ctx.calibrator.load_state_dict)
    # Random states come last: restoring the others may draw random numbers.
    state.add("python", random.getstate, random.setstate)
    state.add("numpy", lambda: np.random.get_state(legacy=False), np.random.set_state)
    state.add("torch", torch.get_rng_state, torch.set_rng_state)
    device = ctx.world.device
    if device.type == "cuda":
        state.add(
            "cuda",
            lambda: torch.cuda.get_rng_state(device),
            lambda saved: torch.cuda.set_rng_state(saved, device),
        )
    return state


class RunIdentity:
    """The run's identity in W&B.

    A run folder that was lost and fetched again resumes the same W&B run.
    """

    def __init__(self, run_dir: Path, *, writes: bool) -> None:
        """``writes``: True on the rank that logs."""
        self._run_dir = run_dir
        self._writes = writes
        self.same_run = False
        """Whether the restored checkpoint belongs to this run; set before ``load_state_dict``."""
        self.last_step = 0
        """The newest step in W&B and ``metrics.jsonl``."""

    @property
    def id(self) -> str | None:
        """The W&B id of the run; None without W&B."""
        identity = load_identity(self._run_dir)
        return None if identity is None else identity.id

    def state_dict(self) -> dict[str, Any]:
        """The identity and the newest step."""
        identity = load_identity(self._run_dir)
        return {
            "identity": None if identity is None else asdict(identity),
            "last_step": self.last_step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Write the identity of this run's checkpoint where the run folder has none."""
        self.last_step = state["last_step"]
        may_write = self._writes and self.same_run
        if not may_write or state["identity"] is None:
            return
        if load_identity(self._run_dir) is None:
            save_identity(self._run_dir, WandbIdentity(**state["identity"]))


def _add_counter(state: StateRegistry, ctx: RunContext, name: str) -> None:
    """Register a plain number of ``ctx``."""
    state.add(name, lambda: getattr(ctx, name), lambda saved: setattr(ctx, name, saved))


def _restore_budgets(
    ctx: RunContext, owner: RunContext | Critic, budgets: list[int] | None
) -> None:
    """Budgets lowered in a world of this size; a world of another size measures its own."""
    if budgets is not None and len(budgets) == ctx.world.size:
        owner.lower_budgets(budgets)
