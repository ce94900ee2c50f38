"""What the checkpoint benchmark measures in a round."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from time import perf_counter

import numpy as np

from benchmarks.checkpoint_loop import Arrays, TrainingLoop
from benchmarks.harness import timed
from benchmarks.savers import Ours, Saver

OURS_PER_ROUND = 2
"""Ours has the most bars to hold, so it is measured more often."""
FEW_TOKENS = 8
"""Tokens of a short step."""
DD_BLOCK = 8 << 20


class Times:
    """Seconds, by measure and way to save."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, measure: str, way: str, seconds: float) -> None:
        """Note one measurement."""
        self.all[measure][way].append(seconds)

    def median(self, measure: str, way: str) -> float:
        """Median of the measurements; nan without any."""
        seconds = self.all[measure][way]
        return statistics.median(seconds) if seconds else float("nan")


def in_a_step(loop: TrainingLoop, saver: Saver, times: Times, number: int) -> None:
    """A step without a save, one that begins a save, and steps until all is written."""
    times.add("step", saver.name, timed(loop.step))
    stalls = []
    began = perf_counter()
    stalls.append(timed(lambda: saver.save(number)))
    loop.step(lambda: stalls.append(timed(saver.before_step)))
    times.add("save step", saver.name, perf_counter() - began)
    times.add("stall", saver.name, sum(stalls))
    while saver.busy():
        loop.step()
    saver.wait()
    times.add("behind", saver.name, saver.ended - began)
    if saver.blocks:
        times.add("total", saver.name, saver.ended - began)


def during_writing(loop: TrainingLoop, saver: Saver, times: Times, number: int) -> None:
    """Short steps that run wholly while it writes, in multiples of one without."""
    plain = timed(lambda: loop.step(tokens=FEW_TOKENS))
    saver.save(number)
    saver.before_step()
    while saver.busy():
        seconds = timed(lambda: loop.step(tokens=FEW_TOKENS))
        if saver.busy():
            times.add("slowdown", saver.name, seconds / plain)
    saver.wait()


def alone(loop: TrainingLoop, saver: Saver, times: Times, number: int) -> None:
    """A save with nothing else running; ``loop`` rests."""
    began = perf_counter()
    saver.save(number)
    saver.wait()
    times.add("total", saver.name, saver.ended - began)


def measure_saver(loop: TrainingLoop, saver: Saver, times: Times, number: int) -> None:
    """One turn of a way to save; ``number`` is the step of its first save."""
    actions = {"behind": in_a_step}
    if not saver.blocks:
        actions["alone"] = alone
        if not isinstance(saver, Ours):
            actions["during"] = during_writing
    for name, action in actions.items():
        action(loop, saver, times, number)
        if isinstance(saver, Ours):
            metrics = saver.metrics()
            times.add(f"copy {name}", saver.name, metrics["ckpt/copy_s"])
            times.add(f"write {name}", saver.name, metrics["ckpt/write_s"])
        saver.clear()
        sync_folder(saver.folder)
        number += 1


def copy(sources: Arrays, targets: Arrays) -> None:
    """Copy arrays into memory that is already allocated."""
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def one_round(
    loop: TrainingLoop,
    savers: list[Saver],
    times: Times,
    turn: int,
    sources: Arrays,
    targets: Arrays,
) -> None:
    """A turn of every way to save, of memcpy and of dd."""
    for _ in range(3):
        times.add("total", "memcpy", timed(lambda: copy(sources, targets)))
    times.add("total", "dd", dd(savers[0].folder, sum(s.nbytes for s in sources)))
    for saver in savers:
        for again in range(OURS_PER_ROUND if isinstance(saver, Ours) else 1):
            measure_saver(loop, saver, times, 10 * turn + 4 * again + 1)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has deleted what was removed from ``folder``."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def dd(folder: Path, nbytes: int) -> float:
    """Seconds of ``dd conv=fsync`` for so many bytes."""
    target = folder / "dd"
    command = [
        "dd",
        "if=/dev/zero",
        f"of={target}",
        f"bs={DD_BLOCK}",
        f"count={nbytes // DD_BLOCK}",
        "conv=fsync",
    ]
    seconds = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    target.unlink()
    sync_folder(folder)
    return seconds * nbytes / (nbytes // DD_BLOCK * DD_BLOCK)
