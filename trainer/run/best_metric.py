"""The metric that ``trainer.checkpoint.keep_best`` compares, and its best value so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.base.errors import UserError, nearest

NOT_LISTED = ("timing/", "perf/", "ckpt/", "goodput/", "cost/", "speed/", "batch/")
"""Prefixes of metrics left out when the known ones are listed to the user."""


@dataclass
class BestMetric:
    """The best value of ``metric`` and its step. With ``metric`` None nothing is compared."""

    metric: str | None
    mode: Literal["max", "min"] = "max"
    value: float | None = None
    step: int | None = None

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Compare the metrics of ``step``; of equal values the older one stays the best."""
        value = self.value_in(metrics)
        if value is not None and self._improves(value):
            self.value = value
            self.step = step

    def value_in(self, metrics: Mapping[str, Any]) -> float | None:
        """The metric's value; None when it is missing or NaN, and is then not compared."""
        if self.metric is None:
            return None
        value = metrics.get(self.metric)
        return None if value is None or math.isnan(value) else float(value)

    def require_known(self, known: Collection[str]) -> None:
        """Raise UserError when the metric is not among the ``known`` names."""
        if self.metric is None or self.metric in known:
            return
        listed = sorted(name for name in known if not name.startswith(NOT_LISTED))
        hint = nearest(self.metric, listed) or "."
        raise UserError(
            f"trainer.checkpoint.best_metric={self.metric} is no metric of this run{hint} "
            f"It has {', '.join(listed)}; type trainer.checkpoint.best_metric=NAME, or null for "
            "the validation reward"
        )

    def state_dict(self) -> dict[str, Any]:
        """The metric's name, mode, best value and its step."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the best value, unless it belongs to another metric."""
        if state["metric"] == self.metric and state["mode"] == self.mode:
            self.value = state["value"]
            self.step = state["step"]

    def is_worse(self, value: float | None, *, by: float) -> bool:
        """Whether ``value`` (None: not a number) is worse than the best by more than ``by``."""
        if value is None:
            return True
        if self.value is None:
            return False
        difference = self.value - value if self.mode == "max" else value - self.value
        return difference > by

    def _improves(self, value: float) -> bool:
        if self.value is None:
            return True
        return value > self.value if self.mode == "max" else value < self.value
