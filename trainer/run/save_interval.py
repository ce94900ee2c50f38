"""How often a run saves when ``trainer.checkpoint.save_interval_minutes`` is ``auto``."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.run_folder import read_json_lines
from trainer.run.save_time import job_deadline

DEFAULT_S = 900.0
"""Without known failures: a killed run loses a quarter of an hour at most."""
LEAST_S = 60.0
SAVES_PER_JOB = 4
"""A job saves so many times at least before its time limit."""
NO_FAILURES = frozenset(
    ("done", "preempted", "timeout", "requeued", "signalled", "cancelled", "error")
)
"""Causes in ``attempts.jsonl`` after which the run had saved, or that the user has to mend; after
all others it lost steps.
"""


@dataclass(frozen=True)
class AutoInterval:
    """Seconds between two saves, from what is known of a run's failures and of its job."""

    mtbf_s: float | None
    """Mean time between failures, seconds; None when none is known."""
    job_s: float | None
    """What is left of the job's time limit at its start, seconds; None without a limit."""
    write_share: float
    """Share of the disk's speed at which a save is written beside training."""

    @classmethod
    def from_run(cls, run_dir: Path, *, write_share: float) -> AutoInterval:
        """By the attempts of ``run_dir`` and this process's Slurm job."""
        deadline = job_deadline(os.environ)
        return cls(
            mtbf_s=mean_time_between_failures(read_json_lines(run_dir / "attempts.jsonl")),
            job_s=None if deadline is None else max(0.0, deadline - time.time()),
            write_share=write_share,
        )

    def seconds(self, save_s: float) -> float:
        """The interval. ``save_s``: seconds that a save takes at the disk's full speed."""
        interval_s = DEFAULT_S
        if self.mtbf_s is not None:
            interval_s = min(interval_s, daly_interval(save_s, self.mtbf_s))
        if self.job_s is not None:
            interval_s = min(interval_s, self.job_s / SAVES_PER_JOB)
        # One save has to end before the next begins.
        return max(interval_s, LEAST_S, save_s / self.write_share)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The interval between saves at which a run loses least time, seconds.

    ``save_s``: seconds that a save costs; ``mtbf_s``: mean time between failures. Young, "A first
    order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
    sqrt(2 * save * mtbf); with the terms of higher order of Daly, "A higher order estimate of the
    optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def mean_time_between_failures(attempts: Sequence[Mapping[str, Any]]) -> float | None:
    """From the lines of ``attempts.jsonl``, seconds; None when no attempt failed."""
    running_s = 0.0
    failures = 0
    for attempt in attempts:
        start = attempt.get("start")
        end = attempt.get("end")
        if not isinstance(start, int | float) or not isinstance(end, int | float):
            continue
        running_s += max(0.0, end - start)
        # An attempt that failed as it began lost no steps.
        if attempt.get("cause") not in NO_FAILURES and end - start >= LEAST_S:
            failures += 1
    if failures == 0 or running_s == 0.0:
        return None
    return running_s / failures
