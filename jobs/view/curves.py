"""A run's metrics as curves: attempts merged, a step that was repeated counted once. Pure but for
reading the record.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.base.metrics_file import METRICS_FILE, read_metrics

STEP = "step"
TOKENS = "tokens"
TIME = "time"
AXES = (STEP, TOKENS, TIME)
"""What runs can be compared at: steps, tokens trained on, seconds in the steps that count."""
TOKENS_OF_STEP = "perf/total_num_tokens"
SECONDS_OF_STEP = ("timing/step", "perf/time_per_step")
SIGNS_OF_DIVERGENCE = ("critic/score/mean", "val/reward", "train/loss", "actor/pg_loss")
"""A run whose newest value of one of them is not finite has diverged."""
LOWER_IS_BETTER = ("timing", "loss", "memory", "time_per_step", "kl", "clip_ratio", "error", "lost")
"""Parts of names of metrics that are better when they are lower."""

Points = Sequence[tuple[int, float]]
"""Step and value, in rising order of the steps."""


@dataclass(frozen=True)
class Curves:
    """The metrics of one run."""

    points: Mapping[str, Points]
    names: frozenset[str]
    """All metrics of the run, also those that are not in ``points``."""
    reached: Mapping[str, Mapping[int, float]]
    """Axis -> step -> how far the run was after it."""

    @property
    def last_step(self) -> int | None:
        """The newest step; None when there is none."""
        return max(self.reached[STEP], default=None)

    @property
    def diverged(self) -> bool:
        """Whether the newest reward or loss is NaN or infinite."""
        newest = [self.points[name][-1][1] for name in SIGNS_OF_DIVERGENCE if name in self.points]
        return any(not math.isfinite(value) for value in newest)

    def end(self, axis: str) -> float:
        """How far the run is on an axis; 0.0 without a step."""
        return max(self.reached[axis].values(), default=0.0)


def read_curves(run: Path, wanted: Callable[[str], bool]) -> Curves:
    """The curves of the metrics that are ``wanted``, of a repeated step the newest values."""
    names: set[str] = set()
    kept: dict[str, dict[int, float]] = {}
    needed = {TOKENS_OF_STEP, *SECONDS_OF_STEP, *SIGNS_OF_DIVERGENCE}
    steps: set[int] = set()
    for record in read_metrics(run / METRICS_FILE):
        step = int(record["step"])
        steps.add(step)
        for name, value in record.items():
            if name in (STEP, TIME) or isinstance(value, str) or value is None:
                continue
            names.add(name)
            if name in needed or wanted(name):
                kept.setdefault(name, {})[step] = float(value)
    ordered = sorted(steps)
    tokens = kept.get(TOKENS_OF_STEP, {})
    seconds = next((kept[name] for name in SECONDS_OF_STEP if name in kept), {})
    return Curves(
        points={name: sorted(values.items()) for name, values in kept.items()},
        names=frozenset(names),
        reached={
            STEP: {step: float(step) for step in ordered},
            TOKENS: _sums(ordered, tokens),
            TIME: _sums(ordered, seconds),
        },
    )


def value_of(curves: Curves, name: str, axis: str, at: float | None, how: str) -> float | None:
    """One number of a curve up to ``at`` on ``axis`` (None: to its end); None without a point.

    ``how``: ``last``, ``best``, or ``mean-K``, the mean of the last K values. Best passes over what
    is not finite, unless nothing is finite.
    """
    reached = curves.reached[axis]
    points = curves.points.get(name, ())
    values = [value for step, value in points if at is None or reached[step] <= at]
    if not values:
        return None
    if how == "best":
        finite = [value for value in values if math.isfinite(value)]
        choose = min if lower_is_better(name) else max
        return choose(finite) if finite else values[-1]
    if how.startswith("mean-"):
        last = values[-int(how.removeprefix("mean-")) :]
        return sum(last) / len(last)
    return values[-1]


def common_end(runs: Sequence[Curves], axis: str) -> float | None:
    """How far all runs are on an axis, those aside that have no step or have diverged."""
    ends = [run.end(axis) for run in runs if run.last_step is not None and not run.diverged]
    return min(ends, default=None)


def lower_is_better(name: str) -> bool:
    """Whether less of a metric is better."""
    return any(part in name for part in LOWER_IS_BETTER)


def _sums(steps: Sequence[int], amounts: Mapping[int, float]) -> dict[int, float]:
    total = 0.0
    sums = {}
    for step in steps:
        amount = amounts.get(step, 0.0)
        total += amount if math.isfinite(amount) else 0.0
        sums[step] = total
    return sums
