"""When to save and what to keep: pure functions of numbers that every rank knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal


def due(
    step: int,
    *,
    save_freq: int,
    seconds_since_last: float,
    save_interval_s: float | None = None,
    put_off: bool = False,
    last: bool = False,
    stop: bool = False,
) -> str | None:
    """Why to save after ``step``, or None. Rank 0 decides, since only its clock counts.

    ``save_freq``: each so many steps; 0 or less: never. ``put_off``: an earlier save found no free
    buffer.
    """
    if stop:
        return "stop"
    if last:
        return "last"
    if put_off:
        return "put off"
    if save_freq > 0 and step % save_freq == 0:
        return "steps"
    if save_interval_s is not None and seconds_since_last >= save_interval_s:
        return "interval"
    return None


def must_save_by(deadline: float, *, save_s: float, step_s: float, margin: float) -> float:
    """The latest instant to begin the last save before ``deadline``, when the job is killed
    (seconds of one clock).

    A save begins at a step boundary, so one whole step may still have to end first.
    """
    return deadline - margin * (save_s + step_s)


def kept(
    steps: Sequence[int],
    *,
    keep_last: int,
    keep_every: int | None = None,
    keep_best: int = 0,
    metrics: Mapping[int, float | None] | None = None,
    best: Literal["max", "min"] = "max",
    in_use: Sequence[int] = (),
) -> set[int]:
    """Of the committed ``steps`` those that stay: the newest, the milestones, the best, and those
    in use.

    Of equally good ones the older stays. At least the newest always does.
    """
    ordered = sorted(steps)
    stay = set(ordered[-max(1, keep_last) :]) | (set(in_use) & set(steps))
    if keep_every:
        stay |= {s for s in ordered if s % keep_every == 0}
    values = [(m, s) for s in ordered if (m := (metrics or {}).get(s)) is not None and m == m]
    sign = -1.0 if best == "max" else 1.0
    values.sort(key=lambda pair: (sign * pair[0], pair[1]))
    return stay | {s for _, s in values[:keep_best]}


def predicted_save_s(num_bytes: int, *, bytes_per_s: float, commit_s: float = 1.0) -> float:
    """Seconds from the copy to the commit."""
    return num_bytes / bytes_per_s + commit_s
