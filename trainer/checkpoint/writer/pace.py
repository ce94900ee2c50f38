"""How fast a save is written while training goes on.

A disk at full speed takes memory bandwidth and, on many machines, processor time from a step,
whatever the writer's priority: a step beside it took 1.3 times as long. So the writer is told of
the snapshot piece by piece, at a share of the speed that an earlier save was seen to have. The
first save of an attempt, one that somebody waits for, and one that the next save waits for go at
full speed.
"""

from __future__ import annotations

import math
import threading
import time

STEP = 64 << 20
"""Bytes of a piece; a save of less is not slowed down."""


class Pace:
    """``share``: of the disk's speed; 1: as fast as it goes. ``longest_s``: no save is slowed down
    so far that it would take longer. Safe to call from any thread.
    """

    def __init__(self, share: float, *, longest_s: float = math.inf) -> None:
        self._share, self._longest_s, self._nbytes = share, longest_s, 0
        self._hurry = threading.Event()
        self._speed: float | None = None
        self._began = self._due = 0.0
        self._slowed = False
        self.extra_s = 0.0
        """Seconds that the last save took longer for it."""

    def hurry(self) -> None:
        """Somebody waits: full speed until ``ease``."""
        self._hurry.set()

    def ease(self) -> None:
        """Nobody waits any more."""
        self._hurry.clear()

    def begin(self, nbytes: int) -> None:
        """A save of so many bytes is about to be written."""
        self._nbytes = nbytes
        self._began = self._due = time.monotonic()
        self._slowed = False

    def next(self, known: int, present: int) -> int:
        """How much of ``present`` bytes the writer may know of after ``known``, once it may."""
        if self._share >= 1 or self._speed is None or self._hurry.is_set():
            return present
        if not self._hurry.wait(max(0.0, self._due - time.monotonic())):
            now = min(present, known + STEP)
            rate = max(self._speed * self._share, self._nbytes / self._longest_s)
            self._due = max(self._due, time.monotonic()) + (now - known) / rate
            self._slowed = self._slowed or now < present
            return now
        return present

    def end(self) -> None:
        """All of it is on the disk."""
        nbytes, seconds = self._nbytes, max(time.monotonic() - self._began, 1e-6)
        if not self._slowed and nbytes >= STEP:
            self._speed = nbytes / seconds
        self.extra_s = (
            max(0.0, seconds - nbytes / self._speed) if self._slowed and self._speed else 0.0
        )
