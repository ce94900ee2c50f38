"""How a command of the project ends, whatever happens: one message, and never a traceback."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

from trainer.base.errors import EXIT_USER, UserError, as_user_error, first_line, shortened
from trainer.base.masking import mask

EXIT_BUG = 1
"""Something went wrong that no check foresaw; the message names the file with the traceback."""
EXIT_INTERRUPTED = 128 + signal.SIGINT
"""Ctrl-C."""
EXIT_PIPE = 128 + signal.SIGPIPE
"""Whoever read the output has gone (``| head``)."""

FULL_ERROR = "HYDRA_FULL_ERROR"
"""Environment variable: with 1 every error is shown with its traceback."""

MOST_CHARACTERS = 4000
"""Of a line of a message: a path has no more."""
_typed_full_error: list[str | None] = []

_PATH_ERRORS = {
    errno.ENOENT: "give a file or folder that exists",
    errno.ENOTDIR: "a file stands where a folder belongs; give another place",
    errno.EISDIR: "it is a folder; give a file",
    errno.EEXIST: "something else is there already; give another place",
    errno.ENAMETOOLONG: "the name is too long for this file system; give a shorter one",
    errno.ELOOP: "its links lead in a circle; give the file itself",
    errno.EINVAL: "the name can't be used here; give another one",
    errno.ENXIO: "it is no ordinary file; give another one",
    errno.ESTALE: "the file system has lost it; give another place, or mount it anew",
}
"""Error of a path that was typed -> what to do."""


def run_command(command: Callable[[], int]) -> int:
    """Call ``command`` and return its exit code; an error becomes one message on stderr.

    2 for wrong input, 130 after Ctrl-C, 141 when the reader of the output has gone, and 1 for an
    error that no check foresaw: its traceback goes into a file. What the command and Hydra write is
    closed to other users.
    """
    _open_missing_streams()
    umask = os.umask(0o077)
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _say("Interrupted.", EXIT_INTERRUPTED)
    except BrokenPipeError:
        return _without_reader()
    except Exception as error:
        return report(error)
    finally:
        os.umask(umask)


def let_hydra_raise() -> None:
    """Make Hydra raise its errors instead of printing them, until :func:`restore_full_error`."""
    _typed_full_error.append(os.environ.get(FULL_ERROR))
    os.environ[FULL_ERROR] = "1"


def restore_full_error() -> None:
    """Give the variable that Hydra reads the value that the user gave it."""
    while _typed_full_error:
        typed = _typed_full_error.pop()
        os.environ.pop(FULL_ERROR, None)
        if typed is not None:
            os.environ[FULL_ERROR] = typed


def report(error: Exception) -> int:
    """Say in one message what ``error`` means; returns the exit code."""
    if os.environ.get(FULL_ERROR) == "1":
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
    wrong = user_error_of(error)
    if wrong is not None:
        return _say(f"Error: {wrong}", EXIT_USER)
    place = _keep_traceback(error)
    return _say(
        f"Error: {type(error).__name__}: {first_line(error)[:500]}\n"
        f"This is a bug, or the machine's fault. {place}",
        EXIT_BUG,
    )


def user_error_of(error: Exception) -> UserError | None:
    """``error`` as a UserError when a command's input caused it, else None."""
    known = as_user_error(error)
    if known is not None:
        return known
    if isinstance(error, OSError) and error.filename is not None and error.errno in _PATH_ERRORS:
        name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename
        return UserError(f"{name}: {error.strerror}; {_PATH_ERRORS[error.errno]}.")
    if isinstance(error, RecursionError):
        return UserError("a value is nested too deeply, or refers to itself; write it flat.")
    return None


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(shown(mask(text)) + "\n")
        sys.stderr.flush()
    return code


def shown(text: str) -> str:
    """``text`` as a terminal may get it: lines of sensible length, and escapes for what isn't
    printable, since a message repeats what others wrote.
    """
    return "\n".join(_shown_line(line) for line in text.split("\n"))


def _shown_line(line: str) -> str:
    line = shortened(line, MOST_CHARACTERS)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _keep_traceback(error: Exception) -> str:
    """Write the traceback into a private file; a sentence that names it."""
    text = mask("".join(traceback.format_exception(error)))
    try:
        handle, path = tempfile.mkstemp(prefix="plimsoll-error-", suffix=".txt")
        with os.fdopen(handle, "w", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return f"{FULL_ERROR}=1 shows where it happened."
    return f"Where it happened is in {Path(path)}."


def _without_reader() -> int:
    """The reader of the output has gone: nothing more is written, at the exit neither."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError, ValueError):
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return EXIT_PIPE


def _open_missing_streams() -> None:
    """Standard streams that are closed (``>&-``) become the null device: otherwise the next file
    that is opened would take their place, and what is printed would go into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
