"""Errors that are the user's to mend, and the exit codes of a run."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_OK = 0
"""Finished."""
EXIT_USER = 2
"""Wrong input: one message says what, where and what to type instead. Never requeued."""
EXIT_BAD_NODE = 77
"""The node is unfit (GPU lost, disk full): requeue elsewhere and exclude it."""
EXIT_REQUEUE = 85
"""Saved at a step boundary and wants to go on in a later attempt."""


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what to type instead; it is shown
    without a traceback.
    """


class Failure(RuntimeError):
    """A part outside this process failed for good. Nobody's input is wrong and the message says
    all: no traceback.
    """


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that a user has to mend: full, over the quota, read-only."""


def as_user_error(error: BaseException) -> UserError | None:
    """``error`` as one that the user can mend, where it is one: a UserError itself, a disk that
    takes no more, a file that may not be read or written.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, PermissionError) and error.filename:
        return UserError(
            f"no access to {error.filename} ({error.strerror}): have its owner give it to you, or "
            "name another place"
        )
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        place = f" for {error.filename}" if error.filename else ""
        return UserError(
            f"the disk takes no more data{place} ({error.strerror}): free space, or set "
            "trainer.default_local_dir to a "
            "folder on another disk. What was saved is intact: the same command goes on from the "
            "last checkpoint."
        )
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint ``; did you mean 'X'?`` for a misspelt ``word``, or nothing when no known word is
    near.
    """
    found = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{found[0]}'?" if found else ""
