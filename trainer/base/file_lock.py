"""A lock between processes for the time of a few writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.01


@contextlib.contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock file ``path``, which is made if it is missing (mode 0600).

    Where a file system has no locks, nothing is locked. Raises TimeoutError when another process
    holds it for longer than ``wait_s`` seconds, and OSError when the file can't be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        deadline = time.monotonic() + wait_s
        while is_locked_by_another(descriptor):
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another command has locked it", str(path))
            time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def is_locked_by_another(descriptor: int) -> bool:
    """Try to lock an open file. A file system without locks counts as locked by this process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False
