"""Goodput: what share of the time that a run took went into steps that count, over all its
attempts.

An attempt's times come from the batch script's records where there are any (``attempts.jsonl``,
``begin.json``), else from ``logs/attempt_N/clock.json``, which the trainer keeps for itself.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.base.metrics_file import METRICS_FILE, by_step
from trainer.base.run_folder import log_folder, read_json, read_lines

CLOCK = "clock.json"


@dataclass
class Attempt:
    """One attempt. Instants in seconds since 1970."""

    number: int
    start: float
    end: float
    undone_steps: int = 0
    """Steps that it took and a later attempt did again, since no checkpoint held them."""
    undone_s: float = 0.0


def goodput(attempts: Sequence[Attempt], productive_s: float) -> dict[str, float]:
    """``goodput/*``. ``productive_s``: seconds of the steps that the run's weights consist of, each
    counted once.

    ETTR = productive time / wall time of all attempts (Kokolis et al., "Revisiting Reliability in
    Large-Scale Machine Learning Research Clusters", arXiv 2410.21680, section II): starting up,
    restoring, validation, waiting for checkpoints at a step's end, and steps that were lost and
    done again are not productive. Time between attempts, when nothing ran (the queue), is told
    apart, and so is the ratio with it. Attempts may overlap (a node cut off from the network): that
    time counts once.
    """
    wall = waiting = 0.0
    until: float | None = None
    for attempt in sorted(attempts, key=lambda a: a.start):
        begin = attempt.start if until is None else max(attempt.start, until)
        waiting += 0.0 if until is None else begin - until
        wall += max(0.0, attempt.end - begin)
        until = max(begin, attempt.end)
    total = wall + waiting
    return {
        "goodput/ettr": min(1.0, productive_s / wall) if wall > 0 else 0.0,
        "goodput/ettr_with_queue": min(1.0, productive_s / total) if total > 0 else 0.0,
        "goodput/productive_s": productive_s,
        "goodput/wall_s": wall,
        "goodput/queue_s": waiting,
        "goodput/lost_s": math.fsum(a.undone_s for a in attempts),
        "goodput/lost_steps": float(sum(a.undone_steps for a in attempts)),
        "goodput/attempts": float(len(attempts)),
    }


class Clock:
    """This attempt's times beside those of the earlier ones. Rank 0 keeps it; it never raises for a
    full disk.
    """

    def __init__(
        self, run_dir: Path, number: int, *, restored: int, now: float | None = None
    ) -> None:
        """``restored``: the step that the run goes on from. To be made before the record beyond it
        is cut off.
        """
        self._folder = log_folder(run_dir, number)
        self._earlier = list(earlier_attempts(run_dir, number))
        record = by_step(run_dir / METRICS_FILE) if (run_dir / METRICS_FILE).exists() else {}
        undone = [line for step, line in record.items() if step > restored]
        if self._earlier and record:
            last = self._earlier[-1]
            last.end = max([last.end, *(float(line.get("time", 0.0)) for line in record.values())])
        start = _begin(run_dir, number)
        self._own = Attempt(
            number, process_start() if start is None else start, time.time() if now is None else now
        )
        # Kept by the attempt that does them again: the one that lost them is over, and its file may
        # be missing.
        self._own.undone_steps = len([line for line in undone if "timing/step" in line])
        self._own.undone_s = math.fsum(float(line.get("timing/step", 0.0)) for line in undone)
        self.note()

    def metrics(self, productive_s: float, now: float | None = None) -> dict[str, float]:
        """``goodput/*`` as of now."""
        self._own.end = time.time() if now is None else now
        return goodput([*self._earlier, self._own], productive_s)

    def note(self) -> None:
        """Write this attempt's times down, for the attempts after it."""
        path = self._folder / CLOCK
        temporary = path.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w"
            ) as file:
                json.dump(asdict(self._own), file)
            os.replace(temporary, path)


def earlier_attempts(run_dir: Path, number: int) -> Iterable[Attempt]:
    """The attempts before ``number``, oldest first; those that left no times are left out."""
    closed = {line.get("attempt"): line for line in read_lines(run_dir / "attempts.jsonl")}
    for earlier in range(1, number):
        own = read_json(log_folder(run_dir, earlier) / CLOCK)
        script = closed.get(earlier, {})
        begin = _begin(run_dir, earlier)
        starts = [x for x in (script.get("start"), begin, own.get("start")) if x is not None]
        ends = [x for x in (script.get("end"), own.get("end")) if x is not None]
        if starts:
            start = float(min(starts))
            end = max([start, *map(float, ends)])
            yield Attempt(
                earlier,
                start,
                end,
                int(own.get("undone_steps", 0)),
                float(own.get("undone_s", 0.0)),
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


def _begin(run_dir: Path, number: int) -> float | None:
    start = read_json(log_folder(run_dir, number) / "begin.json").get("start")
    return None if start is None else float(start)
