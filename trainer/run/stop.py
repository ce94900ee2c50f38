"""What is said of a stop: at once what happens next, and before how long one may take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.base import signals
from trainer.config.schema.trainer import Trainer
from trainer.run.context import RunContext
from trainer.run.reporter import RunReporter

UPDATE_PHASES = ("adv", "update_critic", "update_actor")
"""What of a step can't be left once it has begun."""


def announce_stops(ctx: RunContext, reporter: RunReporter) -> None:
    """Say on rank 0, as soon as a stop is requested, what happens next."""

    def announce(cause: str) -> None:
        if signals.leaves_at_once():
            text = f"Asked to stop ({cause}): leaving at once, since no step was trained yet"
        else:
            text = f"Asked to stop ({cause}): saving step {ctx.stop_step}"
        if cause == "INT":
            text += "; Ctrl-C again ends without saving"
        reporter.message(f"{text}.")

    signals.on_request(announce if ctx.world.is_main else None)


class StopTime:
    """The longest that a stop has to wait: the update of a step, which ends first, and the save."""

    def __init__(self, trainer: Trainer) -> None:
        self._grace_s = trainer.grace_period_s
        self._margin = trainer.checkpoint.save_margin
        self._steps = 0
        self._longest_update_s = 0.0
        self._warned = False

    def observe(self, metrics: Mapping[str, Any], save_s: float) -> str | None:
        """A warning, once, when it does not fit into ``trainer.grace_period_s``.

        ``metrics``: of a step; an attempt's first one, which may compile kernels, doesn't count.
        ``save_s``: seconds that a save takes.
        """
        self._steps += 1
        if self._steps == 1:
            return None
        update_s = sum(metrics.get(f"timing/{phase}", 0.0) for phase in UPDATE_PHASES)
        self._longest_update_s = max(self._longest_update_s, update_s)
        needed_s = self._longest_update_s + self._margin * save_s
        if self._warned or needed_s <= self._grace_s:
            return None
        self._warned = True
        return (
            f"[WARNING] a stop may take {needed_s:.3g} s: the update of a step ends first (up to "
            f"{self._longest_update_s:.3g} s so far), then it is saved ({save_s:.3g} s, times "
            f"trainer.checkpoint.save_margin={self._margin:g}), but "
            f"trainer.grace_period_s={self._grace_s:g}: a job that is killed after that loses the "
            "steps since its last save. Make trainer.grace_period_s and "
            f"hydra.launcher.signal_delay_s {needed_s:.0f} or more (for preemptions also the "
            "GraceTime of the site), or make the steps smaller (data.train_batch_size, "
            "actor_rollout_ref.actor.ppo_epochs)."
        )
