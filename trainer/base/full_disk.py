"""Small writes that wait for room on a full disk. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from trainer.base import signals

T = TypeVar("T")
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors that may pass: a full disk, a quota, a file server that restarts."""
WAIT_S = 300.0
"""How long a write waits. Someone who is called has time to delete something, and the ranks that
wait meanwhile do so for longer.
"""
ASKED_TO_STOP_S = 10.0
"""How long it waits once the run is asked to stop: the last checkpoint needs the grace period."""
POLL_S = 0.5


def patiently(write: Callable[[], T], what: str, *, wait_s: float = WAIT_S) -> T:
    """Call ``write`` again while the disk takes nothing, at most ``wait_s`` seconds.

    ``what`` is written, for the message on stderr. Raises the OSError of the last try.
    """
    began = time.monotonic()
    told = False
    while True:
        try:
            result = write()
        except OSError as error:
            limit_s = wait_s
            if signals.requested() is not None:
                limit_s = min(wait_s, ASKED_TO_STOP_S)
            if error.errno not in PASSING or time.monotonic() - began >= limit_s:
                raise
            if not told:
                _say(
                    f"[WARNING] {what} can't be written ({error.strerror}): waiting up to "
                    f"{wait_s:.0f} s for room"
                )
                told = True
            time.sleep(POLL_S)
            continue
        if told:
            _say(f"{what} is written, after {time.monotonic() - began:.0f} s")
        return result


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # stderr may be a file on the same disk
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
