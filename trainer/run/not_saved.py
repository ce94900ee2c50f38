"""The error of a run whose last save failed."""

from __future__ import annotations

import errno
import os

from trainer.base.errors import DISK_FULL, Failure, UserError


def not_saved(step: int, reason: str) -> Exception:
    """The error to leave with when the last save failed.

    A UserError for a disk that is full or that this user may not write to.
    """
    text = f"step {step} is not saved: {reason or 'the saves before it never ended'}"
    if any(os.strerror(number) in reason for number in DISK_FULL):
        return UserError(
            f"{text}. Free space, then type the same command: it goes on from the last checkpoint"
        )
    if os.strerror(errno.EACCES) in reason:
        return UserError(
            f"{text}. Have the folder made writable, then type the same command: it goes on from "
            "there"
        )
    return Failure(text)
