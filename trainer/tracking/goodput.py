"""Goodput: the share of a run's time that went into steps that count, over all its attempts.

An attempt's times come from the batch script's records where there are any (``attempts.jsonl``,
``begin.json``), else from ``logs/attempt_N/clock.json``, which the trainer writes itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.base import atomic
from trainer.base.metrics_file import METRICS_FILE, by_step
from trainer.base.run_folder import log_folder, read_json, read_json_lines

CLOCK_FILE = "clock.json"


@dataclass
class Attempt:
    """One attempt; its fields are those of ``clock.json``. Instants in seconds since 1970."""

    number: int
    start: float
    end: float
    undone_steps: int = 0
    """Steps of earlier attempts that it took again, since no checkpoint held them."""
    undone_s: float = 0.0
    """Seconds that these steps had taken."""


def goodput(attempts: Sequence[Attempt], productive_s: float) -> dict[str, float]:
    """``goodput/*``. ``productive_s``: seconds of the steps that the run's weights consist of, each
    counted once.

    ETTR = productive time / wall time of all attempts (Kokolis et al., "Revisiting Reliability in
    Large-Scale Machine Learning Research Clusters", arXiv 2410.21680, section II): starting up,
    restoring, validation, waiting for checkpoints at a step's end, and steps that were lost and
    taken again are not productive. Time between attempts, when nothing ran (the queue), is a metric
    of its own, and so is the ratio that includes it. Attempts may overlap (a node cut off from the
    network): that time counts once.
    """
    wall_s = 0.0
    queue_s = 0.0
    covered_until: float | None = None
    for attempt in sorted(attempts, key=lambda attempt: attempt.start):
        begin = attempt.start
        if covered_until is not None:
            begin = max(begin, covered_until)
            queue_s += begin - covered_until
        wall_s += max(0.0, attempt.end - begin)
        covered_until = max(begin, attempt.end)
    return {
        "goodput/ettr": _share(productive_s, wall_s),
        "goodput/ettr_with_queue": _share(productive_s, wall_s + queue_s),
        "goodput/productive_s": productive_s,
        "goodput/wall_s": wall_s,
        "goodput/queue_s": queue_s,
        "goodput/lost_s": math.fsum(attempt.undone_s for attempt in attempts),
        "goodput/lost_steps": float(sum(attempt.undone_steps for attempt in attempts)),
        "goodput/attempts": float(len(attempts)),
    }


class GoodputClock:
    """Keeps this attempt's times, together with those of earlier attempts. Made on rank 0; a full
    disk never raises here.
    """

    def __init__(
        self, run_dir: Path, number: int, *, restored: int, now: float | None = None
    ) -> None:
        """``restored``: the step that the run continues from. Make the clock before the lines of
        later steps are set aside.
        """
        self._folder = log_folder(run_dir, number)
        self._earlier = list(earlier_attempts(run_dir, number))
        record = by_step(run_dir / METRICS_FILE)
        if self._earlier and record:
            last = self._earlier[-1]
            last_line = max(float(line.get("time", 0.0)) for line in record.values())
            last.end = max(last.end, last_line)
        start = _begin_time(run_dir, number)
        self._current = Attempt(
            number=number,
            start=process_start() if start is None else start,
            end=time.time() if now is None else now,
        )
        # Kept by the attempt that takes them again: the one that lost them is over, and its file
        # may be missing.
        undone = [
            float(line["timing/step"])
            for step, line in record.items()
            if step > restored and "timing/step" in line
        ]
        self._current.undone_steps = len(undone)
        self._current.undone_s = math.fsum(undone)
        self.save()

    def metrics(self, productive_s: float, now: float | None = None) -> dict[str, float]:
        """``goodput/*`` as of now."""
        self._current.end = time.time() if now is None else now
        return goodput([*self._earlier, self._current], productive_s)

    def save(self) -> None:
        """Write this attempt's times to its log folder, for the attempts after it."""
        path = self._folder / CLOCK_FILE
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            atomic.write_json(path, asdict(self._current))


def earlier_attempts(run_dir: Path, number: int) -> Iterator[Attempt]:
    """The attempts before ``number``, oldest first, without those that left no times."""
    closed = {line.get("attempt"): line for line in read_json_lines(run_dir / "attempts.jsonl")}
    for earlier in range(1, number):
        clock = read_json(log_folder(run_dir, earlier) / CLOCK_FILE)
        script = closed.get(earlier, {})
        starts = [script.get("start"), _begin_time(run_dir, earlier), clock.get("start")]
        known_starts = [float(start) for start in starts if start is not None]
        ends = [float(end) for end in (script.get("end"), clock.get("end")) if end is not None]
        if known_starts:
            start = min(known_starts)
            yield Attempt(
                number=earlier,
                start=start,
                end=max([start, *ends]),
                undone_steps=int(clock.get("undone_steps", 0)),
                undone_s=float(clock.get("undone_s", 0.0)),
            )


def process_start() -> float:
    """When this process began, seconds since 1970; now, where the kernel doesn't say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        boot = next(
            line
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime ")
        )
        return min(time.time(), int(boot.split()[1]) + ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, StopIteration):
        return time.time()


def _begin_time(run_dir: Path, number: int) -> float | None:
    """When the batch script began an attempt; None without a batch script."""
    start = read_json(log_folder(run_dir, number) / "begin.json").get("start")
    return None if start is None else float(start)


def _share(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole > 0 else 0.0
