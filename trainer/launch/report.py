"""What a failing rank says, and how it reaches the screen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from trainer.base.environment import TERMINAL
from trainer.base.errors import EXIT_USER, Failure, as_user_error

ERROR_FILE = "PLIMSOLL_ERROR_FILE"
"""Where a launched rank leaves its error, so that the launcher can show it last."""
TAIL_LINES = 40
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class LogText:
    """A terminal's bytes as lines for a log: no colours, and of a line that was drawn over only its
    last state.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """The whole lines that ``data`` completes."""
        *whole, rest = (self._pending + data).split(b"\n")
        self._pending = rest.rsplit(b"\r", 1)[-1] if b"\r" in rest[:-1] else rest
        return b"".join(
            _ESCAPES.sub(b"", line.rstrip(b"\r").rsplit(b"\r", 1)[-1]) + b"\n" for line in whole
        )

    def end(self) -> bytes:
        """What is left without a line's end."""
        return _ESCAPES.sub(b"", self._pending)


def report_error(error: BaseException) -> int:
    """For a rank's ``main``: tell ``error`` and return the exit code (2 for the user's to mend,
    else 1).

    What the user can mend (:func:`as_user_error`), and a Failure, shows no traceback unless
    HYDRA_FULL_ERROR=1. Under the launcher the text goes to the error file, which the launcher
    prints once and last; otherwise to stderr.
    """
    users = as_user_error(error)
    told = users or (error if isinstance(error, Failure) else None)
    brief = told is not None and os.environ.get("HYDRA_FULL_ERROR") != "1"
    text = f"Error: {told}" if brief else "".join(traceback.format_exception(error)).rstrip()
    code = 1 if users is None else EXIT_USER
    path = os.environ.get(ERROR_FILE)
    if path is None or not _leave(Path(path), code, text):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    return code


def _leave(path: Path, code: int, text: str) -> bool:
    temporary = path.with_suffix(
        ".tmp"
    )  # the launcher looks for the file at any time: it must be whole
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"code": code, "time": time.time(), "text": text}, file)
        temporary.replace(path)
        return True
    except OSError:  # a full disk is a likely reason to be here
        return False


@dataclass(frozen=True)
class Left:
    """What a failing rank left in its error file."""

    code: int
    """The exit code it meant to end with."""
    time: float
    """When it failed, time.time(): the file's own time may be another machine's."""
    text: str


def read_error(error_file: Path) -> Left | None:
    """What a rank left; None when it left nothing."""
    try:
        return Left(**json.loads(error_file.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def error_of(log: Path, error_file: Path) -> str:
    """A rank's error: what it left in its error file (also appended to its log), else the tail of
    its log.
    """
    left = read_error(error_file)
    if left is None:
        return tail(log)
    text = left.text
    try:
        with open(log, "a") as file:
            file.write(text + "\n")
        error_file.unlink()
    except OSError:
        pass
    return text


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last ``lines`` lines of a log; at most 64 KiB are read."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(its log can't be read: {error})"


class Screen:
    """The launcher's standard output, shared by rank 0's mirrored output and the launcher's own
    lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """Write one message. A closed terminal is no reason to lose a run."""
        self._write(text.encode() + b"\n")

    def _write(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            buffer = getattr(self._stream, "buffer", None)
            if buffer is None:  # a captured stream
                self._stream.write(data.decode(errors="replace"))
            else:
                buffer.write(data)
            self._stream.flush()

    def terminal(self) -> dict[str, str]:
        """What rank 0 must know about the terminal its output ends on, as environment variables;
        empty without one.
        """
        try:
            if self._stream.isatty():
                return {
                    TERMINAL: "1",
                    "COLUMNS": str(os.get_terminal_size(self._stream.fileno()).columns or 80),
                }
        except (OSError, ValueError):
            pass
        return {}

    def mirror(self, pipe: IO[bytes], log: Path) -> threading.Thread:
        """Copy a rank's output to its log and to the screen until it ends."""

        def copy() -> None:
            text = LogText()
            with (
                open(
                    os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab", buffering=0
                ) as file,
                pipe,
            ):
                while data := os.read(pipe.fileno(), 65536):
                    self._write(data)
                    with contextlib.suppress(
                        OSError
                    ):  # a full disk must not stop rank 0 by filling its pipe
                        file.write(text.feed(data))
                with contextlib.suppress(OSError):
                    file.write(text.end())

        thread = threading.Thread(target=copy, name="rank-0-screen", daemon=True)
        thread.start()
        return thread
