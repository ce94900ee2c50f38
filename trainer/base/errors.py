"""Errors that the user can fix, and the exit codes of a run."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_OK = 0
"""Finished."""
EXIT_USER = 2
"""Wrong input, never requeued. One message says what is wrong, where, and what to type instead."""
EXIT_BAD_NODE = 77
"""The node is bad (GPU lost, disk full): requeue elsewhere and exclude it."""
EXIT_REQUEUE = 85
"""Saved at a step boundary; a later attempt continues."""


class UserError(Exception):
    """Wrong input. The message says what is wrong, where, and what to type instead; it is shown
    without a traceback.
    """


class Failure(RuntimeError):
    """A part outside this process failed for good, and no input is wrong. The message explains it,
    so it is shown without a traceback.
    """


class PeerLost(Failure):
    """Another process of the run did not come in time, or is gone."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a disk that only the user can fix: full, over the quota, read-only."""


def as_user_error(error: BaseException) -> UserError | None:
    """``error`` as a UserError when the user can fix it, else None.

    That is a UserError itself, a disk that takes no more, and a file that may not be read or
    written.
    """
    if isinstance(error, UserError):
        return error
    if isinstance(error, PermissionError) and error.filename:
        return UserError(
            f"no access to {error.filename} ({error.strerror}): have its owner give it to you, or "
            "name another place"
        )
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        file = f" for {error.filename}" if error.filename else ""
        return UserError(
            f"the disk takes no more data{file} ({error.strerror}): free space, or set "
            "trainer.default_local_dir to a folder on another disk. What was saved is intact: the "
            "same command goes on from the last checkpoint."
        )
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """The hint ``; did you mean 'X'?`` for a misspelt ``word``; empty when nothing is near."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type when it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def typed_line(error: BaseException) -> str:
    """Type and first line of an error of a library, whose text alone may be one word."""
    return f"{type(error).__name__}: {first_line(error)}"


def shortened(text: str, most: int = 200) -> str:
    """``text`` for a message: without its middle when it is longer than ``most`` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most - 20]}... ({len(text)} characters) ...{text[-10:]}"
