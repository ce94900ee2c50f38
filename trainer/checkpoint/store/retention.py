"""Which checkpoints stay: a pure function of the steps, their health and their metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Literal


def steps_to_keep(
    steps: Sequence[int],
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: int = 0,
    metrics: Mapping[int, float | None] | None = None,
    best_mode: Literal["max", "min"] = "max",
    unhealthy: Collection[int] = (),
) -> set[int]:
    """The committed ``steps`` that stay: the newest, the milestones and the best.

    Of equally good ones the older stays. The newest of all always does. Those in ``unhealthy``
    count neither among the ``keep_last`` newest nor as milestones or best ones.
    """
    ordered = sorted(steps)
    healthy = [step for step in ordered if step not in unhealthy]
    keep = {*ordered[-1:], *healthy[-max(1, keep_last) :]}
    if keep_every:
        keep |= {step for step in healthy if step % keep_every == 0}
    return keep | set(best_first(healthy, metrics or {}, best_mode)[:keep_best])


def best_first(
    steps: Sequence[int], metrics: Mapping[int, float | None], best_mode: Literal["max", "min"]
) -> list[int]:
    """Steps with a metric (neither None nor NaN), the best first, of equal ones the older first."""
    sign = -1.0 if best_mode == "max" else 1.0
    ranked = []
    for step in steps:
        value = metrics.get(step)
        if value is not None and not math.isnan(value):
            ranked.append((sign * value, step))
    return [step for _, step in sorted(ranked)]
