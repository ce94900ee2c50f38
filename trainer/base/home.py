"""Paths that begin with ``~``."""

from __future__ import annotations

from pathlib import Path

from trainer.base.errors import UserError


def expanded(path: str | Path, instead: str = "give a path without ~") -> Path:
    """``path`` with ``~`` replaced by the home folder.

    Raises UserError, with what to do ``instead``, for a user who has none: no HOME, and no entry in
    the system's list of users, as in some containers.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise UserError(
            f"{path}: this user has no home folder (HOME isn't set); set HOME, or {instead}"
        ) from error
