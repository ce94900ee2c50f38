"""How a failing rank's error reaches the launcher, which shows it last: through a file."""

from __future__ import annotations

import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.base import atomic
from trainer.base.errors import EXIT_USER, Failure, as_user_error
from trainer.base.json_files import Fields, is_count, is_number, read_object
from trainer.base.run_folder import log_tail

ERROR_FILE = "PLIMSOLL_ERROR_FILE"
"""Path of the file to which a launched rank writes its error."""


@dataclass(frozen=True)
class RankError:
    """The contents of a failing rank's error file."""

    code: int
    """The exit code that it is about to end with."""
    time: float
    """time.time() of the failure: the file's own time may be another machine's."""
    text: str


_FIELDS: Fields = {
    "code": is_count,
    "time": is_number,
    "text": lambda value: isinstance(value, str),
}


def report_error(error: BaseException) -> int:
    """Report ``error`` of a rank and return its exit code: 2 when the user can fix it, else 1.

    Errors that the user can fix (:func:`as_user_error`) and a Failure show no traceback unless
    HYDRA_FULL_ERROR=1. Under the launcher the text goes to the error file, which the launcher
    prints once and last; otherwise to stderr.
    """
    user_error = as_user_error(error)
    explained = user_error or (error if isinstance(error, Failure) else None)
    if explained is not None and os.environ.get("HYDRA_FULL_ERROR") != "1":
        text = f"Error: {explained}"
    else:
        text = "".join(traceback.format_exception(error)).rstrip()
    code = 1 if user_error is None else EXIT_USER
    path = os.environ.get(ERROR_FILE)
    if path is None or not _write(Path(path), RankError(code, time.time(), text)):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    return code


def read_error(error_file: Path) -> RankError | None:
    """The error that a rank has written; None when it has written none."""
    values = read_object(error_file, _FIELDS)
    if not set(_FIELDS) <= set(values):
        return None
    return RankError(**{name: values[name] for name in _FIELDS})


def take_error(log: Path, error_file: Path) -> str:
    """The text of a rank's error file, moved into its log; the end of its log without one."""
    error = read_error(error_file)
    if error is None:
        return log_tail(log)
    try:
        with log.open("a", errors="backslashreplace") as file:
            file.write(error.text + "\n")
        error_file.unlink()
    except OSError:
        pass
    return error.text


def _write(path: Path, error: RankError) -> bool:
    """Write the file, whole, since the launcher may read it at any time; False when it can't be."""
    try:
        atomic.write_json(path, asdict(error))
        return True
    except OSError:  # a full disk is a likely reason to be here
        return False
