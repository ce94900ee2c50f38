"""How fast a save is written while training goes on.

A disk at full speed takes memory bandwidth and, on many machines, processor time from the training
step, whatever the writer's priority: a step at the same time took 1.3 times as long. So the writer
is given the snapshot in pieces, at a share of the speed that an earlier save reached. The first
save of an attempt, a save that blocks training, and one that the next save waits for are written at
full speed.
"""

from __future__ import annotations

import math
import threading
import time

PIECE_BYTES = 64 << 20
"""Bytes released at a time; a smaller save is not slowed down."""


class WriteThrottle:
    """Releases a snapshot to the writer piece by piece. Safe to call from any thread."""

    def __init__(self, share: float, *, max_s: float = math.inf) -> None:
        """``share`` of the disk's speed; 1: full speed. No save is slowed down beyond ``max_s``."""
        self._share = share
        self._max_s = max_s
        self._full_speed = threading.Event()
        self._disk_speed: float | None = None
        """Bytes per second of the last save at full speed."""
        self._nbytes = 0
        self._started = 0.0
        self._next_release = 0.0
        self._was_slowed = False
        self.delay_s = 0.0
        """Seconds by which throttling prolonged the last save."""

    def suspend(self) -> None:
        """Write at full speed until ``resume``: something waits for the save."""
        self._full_speed.set()

    def resume(self) -> None:
        """Throttle again."""
        self._full_speed.clear()

    def start_save(self, nbytes: int) -> None:
        """A save of ``nbytes`` is about to be written."""
        self._nbytes = nbytes
        self._started = time.monotonic()
        self._next_release = self._started
        self._was_slowed = False

    def release(self, released: int, available: int) -> int:
        """Wait until more bytes may be written; return how many of ``available`` in total.

        ``released`` is the result of the call before, 0 at first.
        """
        if self._share >= 1 or self._disk_speed is None or self._full_speed.is_set():
            return available
        if self._full_speed.wait(max(0.0, self._next_release - time.monotonic())):
            return available
        released_now = min(available, released + PIECE_BYTES)
        speed = max(self._disk_speed * self._share, self._nbytes / self._max_s)
        pause_s = (released_now - released) / speed
        self._next_release = max(self._next_release, time.monotonic()) + pause_s
        if released_now < available:
            self._was_slowed = True
        return released_now

    def finish_save(self) -> None:
        """The save is on the disk: measure its speed and delay."""
        seconds = max(time.monotonic() - self._started, 1e-6)
        if not self._was_slowed and self._nbytes >= PIECE_BYTES:
            self._disk_speed = self._nbytes / seconds
        self.delay_s = 0.0
        if self._was_slowed and self._disk_speed:
            self.delay_s = max(0.0, seconds - self._nbytes / self._disk_speed)
