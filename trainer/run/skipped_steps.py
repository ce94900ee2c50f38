"""Training steps that change nothing, since their gradients are not finite."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.base.errors import UserError
from trainer.config.schema import Config

TRAINED = ("actor", "train", "critic")
"""Prefixes of ``skipped_steps`` and ``optimizer_steps``."""
_SIGNS = {
    "the reward": ("critic/score/mean", "critic/score/max", "critic/score/min"),
    "the advantage": ("critic/advantages/mean", "critic/advantages/max", "critic/advantages/min"),
    "the critic's values or loss": ("critic/values/mean", "critic/vf_loss"),
    "the loss": ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "train/loss", "train/nll"),
}
"""What may not be finite -> the metrics that show it, in the order in which one makes the next."""


class SkippedSteps:
    """Counts the training steps in a row without an applied optimizer step."""

    def __init__(self, limit: int | None) -> None:
        """``limit``: so many in a row end the run; 0 or None: none do."""
        self._limit = limit
        self.in_a_row = 0
        self.first: int | None = None
        """The first of them."""
        self._causes: list[str] = []
        self._observed: int | None = None

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count ``step``, which has these metrics; once, however often it is seen."""
        if step == self._observed:
            return
        self._observed = step
        if not any(_all_skipped(metrics, prefix) for prefix in TRAINED):
            self.in_a_row = 0
            self.first = None
            return
        self.in_a_row += 1
        if self.first is None:
            self.first = step
        self._causes = not_finite(metrics)

    @property
    def reached_limit(self) -> bool:
        """Whether the run has to end."""
        return bool(self._limit) and self.in_a_row >= (self._limit or 0)

    def error(self, config: Config, earlier: Sequence[Path]) -> UserError:
        """The error that ends the run. ``earlier``: checkpoints from before, newest first."""
        actor = config.actor_rollout_ref.actor
        saved = "No checkpoint was saved before"
        if earlier:
            first = f"step_{(self.first or 1) - 1}"
            # The update before may have spoilt the weights, finite as its gradient was.
            unsuspected = [folder for folder in earlier if folder.name != first]
            good = [*unsuspected, *earlier][0]
            saved = (
                f"Saved before: {', '.join(folder.name for folder in earlier[:3])} ({first}, if "
                "saved, has the weights with which it began). Begin a new run, with the change, "
                f"from a good one: trainer.resume_mode=path trainer.resume_from_path={good} "
                "trainer.default_local_dir=OTHER_FOLDER"
            )
        return UserError(
            f"Not finite in every training step since step {self.first}: "
            f"{', '.join(self._causes)}. These {self.in_a_row} steps changed nothing "
            f"(trainer.max_skipped_steps={self._limit}). Lower actor_rollout_ref.actor.optim.lr "
            f"({actor.optim.lr:g}) or actor_rollout_ref.actor.grad_clip ({actor.grad_clip:g}), or "
            f"bound what the reward function returns. {saved}"
        )


def _all_skipped(metrics: Mapping[str, float], prefix: str) -> bool:
    """Whether none of the optimizer steps of this model was applied."""
    skipped = metrics.get(f"{prefix}/skipped_steps", 0.0)
    return skipped > 0 and skipped >= metrics.get(f"{prefix}/optimizer_steps", 0.0)


def not_finite(metrics: Mapping[str, float]) -> list[str]:
    """What is not finite in a skipped step, the cause before its effects."""
    found = [
        what
        for what, names in _SIGNS.items()
        if any(not math.isfinite(metrics.get(name, 0.0)) for name in names)
    ]
    return [*found, "the gradient norm"]
