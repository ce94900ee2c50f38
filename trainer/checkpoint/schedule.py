"""When to save: pure functions of numbers that every rank knows. No torch."""

from __future__ import annotations


def save_reason(
    step: int,
    *,
    save_freq: int,
    seconds_since_last: float,
    save_interval_s: float | None = None,
    postponed: bool = False,
    last: bool = False,
    stop: bool = False,
) -> str | None:
    """Why to save after ``step``, or None. Rank 0 decides, since only its clock counts.

    ``save_freq``: every so many steps; 0 or less: never. ``postponed``: an earlier save found no
    free host buffer.
    """
    if stop:
        return "stop"
    if last:
        return "last"
    if postponed:
        return "postponed"
    if save_freq > 0 and step % save_freq == 0:
        return "steps"
    if save_interval_s is not None and seconds_since_last >= save_interval_s:
        return "interval"
    return None


def must_save_by(deadline: float, *, save_s: float, step_s: float, margin: float) -> float:
    """The latest instant to begin the last save before ``deadline``, when the job is killed.

    Instants are seconds of one clock. A save begins at a step boundary, so one whole step may still
    have to end first.
    """
    return deadline - margin * (save_s + step_s)
