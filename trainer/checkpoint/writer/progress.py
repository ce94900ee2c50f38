"""A host buffer is written while it is still being filled.

The copying thread reports to ``FillProgress`` how many bytes are in place; the committer passes
that on to the writer process as lines in a pipe; there ``FillingBuffer`` waits for the bytes that
are to be written. The pipe also orders what the two processes see of the shared memory.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

KEY = "filled"
END = b"\n"
"""The last line to the writer."""


class FillProgress:
    """How many bytes of a host buffer are in place, counted from its beginning."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._nbytes = 0
        self.failure = ""
        """Why the copy has failed; empty while it has not."""

    def advance(self, nbytes: int) -> None:
        """The first ``nbytes`` are in place."""
        with self._changed:
            self._nbytes = nbytes
            self._changed.notify_all()

    def fail(self, reason: str) -> None:
        """The copy has failed: no more bytes will follow."""
        with self._changed:
            self.failure = reason
            self._changed.notify_all()

    def wait_for_more(self, known: int, timeout_s: float | None = None) -> int:
        """Wait for more than ``known`` bytes, a failure, or ``timeout_s``; return how many."""
        with self._changed:
            self._changed.wait_for(lambda: self._nbytes > known or bool(self.failure), timeout_s)
            return self._nbytes


class FillingBuffer:
    """The writer's view of a host buffer that is being filled; a slice of it is a file."""

    def __init__(self, data: memoryview, lines: Iterator[str]) -> None:
        """``lines``: progress lines of the rank."""
        self._data = data
        self._lines = lines
        self._filled = 0

    def __getitem__(self, part: slice) -> FillingFile:
        start, end, _ = part.indices(len(self._data))
        return FillingFile(self, start, end - start)

    def wait_for(self, start: int, end: int) -> memoryview:
        """The bytes from ``start`` to ``end``, once they are in place.

        Raises EOFError when the rank is gone.
        """
        while self._filled < end:
            line = next(self._lines, None)
            if line is None:
                raise EOFError("the rank is gone")
            self._filled = json.loads(line)[KEY]
        return self._data[start:end]


class FillingFile:
    """Bytes of one file in a ``FillingBuffer``: taking a slice waits until it is in place."""

    def __init__(self, buffer: FillingBuffer, start: int, length: int) -> None:
        self._buffer = buffer
        self._start = start
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> memoryview:
        start, end, _ = part.indices(self._length)
        return self._buffer.wait_for(self._start + start, self._start + end)


def progress_line(nbytes: int) -> bytes:
    """The line that tells the writer that the first ``nbytes`` are in place."""
    return json.dumps({KEY: nbytes}).encode() + b"\n"


def lines_until_end(lines: Iterable[str]) -> Iterator[str]:
    """The lines before ``END``.

    The input itself ends later while processes that the rank forked hold its end of the pipe, too.
    """
    for line in lines:
        if not line.strip():
            return
        yield line


def jobs(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The jobs among the writer's input lines; progress lines of a failed job are skipped."""
    for line in lines:
        message = json.loads(line)
        if KEY not in message:
            yield message
