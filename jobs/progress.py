"""How far the parts of a long submission are."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

FIRST_S = 1.0
"""What takes less says nothing."""
TERMINAL_S = 0.2
"""Time between two updates of a terminal's line."""
LINES_S = 10.0
"""Time between two lines where there is no terminal."""


class Progress:
    """A counter with the time left: one line that is rewritten on a terminal, elsewhere a plain
    line every ``LINES_S``. No colours and no escape sequences.

    Use as a context manager, and call it with the number of items that are done.
    """

    def __init__(
        self,
        action: str,
        total: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.action = action
        self.total = total
        self.stream = stream or sys.stderr
        self.clock = clock
        self.on_terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.start = clock()
        self.next_time = self.start + FIRST_S
        self.width = 0

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int) -> None:
        """Note that ``done`` items are done."""
        now = self.clock()
        if now < self.next_time or done >= self.total or done < 1:
            return
        left = (now - self.start) / done * (self.total - done)
        text = f"{self.action} {done} of {self.total} jobs, about {left:.0f} s left"
        if self.on_terminal:
            self.next_time = now + TERMINAL_S
            self.stream.write("\r" + text.ljust(self.width))
            self.width = len(text)
        else:
            self.next_time = now + LINES_S
            self.stream.write(text + "\n")
        self.stream.flush()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the terminal's line away."""
        if self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
