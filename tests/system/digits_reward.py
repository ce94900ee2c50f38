"""A reward that differs between the answers of an untrained model, so that gradients are not zero.

Where a file ``hold`` lies in the same folder, a process pauses after the number of answers written
in it, until it gets a signal or the file is removed. A run is then still running when a test
interrupts it, however busy the machine is.
"""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")
MAX_WAIT_S = 250.0
_answers = itertools.count(1)
_signals: list[int] = []


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> float:
    answer = next(_answers)
    deadline = time.monotonic() + MAX_WAIT_S
    if answer == 1:
        # Slurm sends them to every process of a step.
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, lambda number, frame: _signals.append(number))
    while answer > _hold_after() and not _signals and time.monotonic() < deadline:
        time.sleep(0.02)
    return sum(ord(letter) % 7 for letter in solution_str) / (1 + 7 * len(solution_str))


def _hold_after() -> float:
    """Number of answers after which to pause; infinite without the file."""
    try:
        return float(HOLD.read_text())
    except FileNotFoundError:
        return float("inf")


def held_copy(folder: Path, answers: int) -> Path:
    """Copy this file into a new ``folder`` with a file ``hold``; return the copy."""
    folder.mkdir()
    (folder / "hold").write_text(str(answers))
    copy = folder / "reward.py"
    copy.write_text(Path(__file__).read_text())
    return copy
