"""A host buffer is written while it is still being filled: how far it is, told by the thread that
copies, passed on to the writer process by the committer, and awaited there piece by piece. The line
between the processes is a pipe, whose ends also order what the two see of the memory.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator
from typing import Any

KEY = "filled"
END = b"\n"
"""The last line to the writer."""


class Filled:
    """Bytes of a host buffer that are in place, from its beginning on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bytes = 0
        self.failed = False

    def advance(self, nbytes: int) -> None:
        """The first ``nbytes`` are in place."""
        with self._changed:
            self._bytes = nbytes
            self._changed.notify_all()

    def fail(self) -> None:
        """There will be no more."""
        with self._changed:
            self.failed = True
            self._changed.notify_all()

    def beyond(self, known: int, timeout_s: float | None = None) -> int:
        """Wait until there are more than ``known``, or there will be no more, or it is too late;
        how many there are.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._bytes > known or self.failed, timeout_s)
            return self._bytes


class Arriving:
    """The writer's view of a buffer: ``lines`` tell how far it is. A slice of it is a file, whose
    slices wait.
    """

    def __init__(self, data: memoryview, lines: Iterator[str]) -> None:
        self._data, self._lines, self._filled = data, lines, 0

    def __getitem__(self, part: slice) -> ArrivingFile:
        first, last, _ = part.indices(len(self._data))
        return ArrivingFile(self, first, last - first)

    def bytes(self, first: int, last: int) -> memoryview:
        """Those from ``first`` to ``last``, once they are in place. Raises EOFError when the rank
        is gone.
        """
        while self._filled < last:
            line = next(self._lines, None)
            if line is None:
                raise EOFError("the rank is gone")
            self._filled = json.loads(line)[KEY]
        return self._data[first:last]


class ArrivingFile:
    """Bytes of one file; a slice of them waits until it is in place."""

    def __init__(self, whole: Arriving, start: int, length: int) -> None:
        self._whole, self._start, self._length = whole, start, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> memoryview:
        first, last, _ = part.indices(self._length)
        return self._whole.bytes(self._start + first, self._start + last)


def line_of(nbytes: int) -> bytes:
    """What tells the writer that the first ``nbytes`` are in place."""
    return json.dumps({KEY: nbytes}).encode() + b"\n"


def until_end(lines: Iterable[str]) -> Iterator[str]:
    """The lines before the empty one. The end of the input comes later than that while processes
    that the rank forked hold its end of the pipe too.
    """
    for line in lines:
        if not line.strip():
            return
        yield line


def jobs(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The jobs among the writer's lines; what still tells of a job that has failed is skipped."""
    for line in lines:
        message = json.loads(line)
        if KEY not in message:
            yield message
