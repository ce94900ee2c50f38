"""Outputs for people, which a run can do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def optional_output(what: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, ``what`` is written. When the disk doesn't take it, ``tell`` says so and the run goes
    on.
    """
    try:
        yield
    except OSError as error:
        tell(f"[WARNING] {what} can't be written ({error.strerror or error}): the run goes on")
