"""A reward that an untrained model earns parts of, so that gradients are not zero.

A file ``hold`` beside it: after as many answers as it says a process judges no more until it is
signalled, or the file is gone. A run is then still there when its interruption comes, however busy
the machine is.
"""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")
LONGEST_S = 250.0
_answers = itertools.count(1)
_asked: list[int] = []


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    answer, until = next(_answers), time.monotonic() + LONGEST_S
    if answer == 1:
        for number in (
            signal.SIGUSR2,
            signal.SIGTERM,
        ):  # Slurm sends them to every process of a step
            signal.signal(number, lambda number, frame: _asked.append(number))
    while answer > _held_from() and not _asked and time.monotonic() < until:
        time.sleep(0.02)
    return sum(ord(letter) % 7 for letter in solution_str) / (1 + 7 * len(solution_str))


def _held_from() -> float:
    try:
        return float(HOLD.read_text())
    except FileNotFoundError:
        return float("inf")


def held_copy(folder: Path, answers: int) -> Path:
    """This file in a new ``folder``, with a ``hold`` beside it."""
    folder.mkdir()
    (folder / "hold").write_text(str(answers))
    copy = folder / "reward.py"
    copy.write_text(Path(__file__).read_text())
    return copy
