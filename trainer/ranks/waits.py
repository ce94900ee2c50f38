"""When this rank was in an exchange with the others: kept only while a step is profiled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from trainer.base.spans import Span

_kept: list[Span] | None = None


@contextlib.contextmanager
def waiting(name: str) -> Iterator[None]:
    """The body is an exchange with the other ranks, which ends when the last one has come."""
    start = time.perf_counter()
    try:
        yield
    finally:
        if _kept is not None:
            _kept.append(Span(name, start, time.perf_counter()))


def keep_waits() -> list[Span]:
    """Begin to keep them, in the list that is returned, until :func:`keep_no_waits`."""
    global _kept
    _kept = []
    return _kept


def keep_no_waits() -> None:
    """Keep no more."""
    global _kept
    _kept = None
