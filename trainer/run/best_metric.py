"""The metric that ``keep_best`` goes by, and the best value so far."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.base.errors import UserError, nearest

NOISE = ("timing/", "perf/", "ckpt/", "goodput/", "cost/", "speed/", "batch/")
"""Names that nobody means when asked for a best; left out where the known ones are listed."""


@dataclass
class Best:
    """``metric`` None: nothing is compared."""

    metric: str | None
    mode: Literal["max", "min"] = "max"
    value: float | None = None
    step: int | None = None

    def observe(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take note of the metrics of ``step``; of equal values the older one stays the best."""
        value = self.of(metrics)
        if value is not None and (self.value is None or self._better(value, self.value)):
            self.value, self.step = value, step

    def of(self, metrics: Mapping[str, Any]) -> float | None:
        """The metric's value, or None where a step has none or it is NaN: such a checkpoint is not
        compared.
        """
        value = metrics.get(self.metric) if self.metric is not None else None
        return None if value is None or math.isnan(value) else float(value)

    def require_known(self, known: Collection[str]) -> None:
        """Raise UserError when the metric is not among the ``known`` names."""
        if self.metric is None or self.metric in known:
            return
        listed = sorted(name for name in known if not name.startswith(NOISE))
        hint = nearest(self.metric, listed) or "."
        raise UserError(
            f"trainer.checkpoint.best_metric={self.metric} is no metric of this run{hint} "
            f"It has {', '.join(listed)}; type trainer.checkpoint.best_metric=NAME, or null for "
            "the validation reward"
        )

    def state_dict(self) -> dict[str, Any]:
        """What ``load_state_dict`` takes."""
        return {"metric": self.metric, "mode": self.mode, "value": self.value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved best, unless it was one of another metric."""
        if (state["metric"], state["mode"]) == (self.metric, self.mode):
            self.value, self.step = state["value"], state["step"]

    def _better(self, one: float, other: float) -> bool:
        return one > other if self.mode == "max" else one < other
