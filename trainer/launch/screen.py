"""The launcher's terminal, and rank 0's output on it and in its log."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from pathlib import Path
from typing import IO, TextIO

from trainer.base.environment import TERMINAL

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """The launcher's standard output, shared by rank 0's mirrored output and the launcher's own
    lines.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def line(self, text: str) -> None:
        """Write one message. A closed terminal doesn't end the run."""
        self._write(text.encode() + b"\n")

    def terminal_variables(self) -> dict[str, str]:
        """Environment variables that describe the terminal to rank 0; empty without one."""
        try:
            if not self._stream.isatty():
                return {}
            columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return {}
        return {TERMINAL: "1", "COLUMNS": str(columns)}

    def mirror(self, output: IO[bytes], log: Path) -> threading.Thread:
        """Copy a rank's output to its log and to the screen, in a thread, until it ends."""
        thread = threading.Thread(
            target=self._copy, args=(output, log), name="rank-0-screen", daemon=True
        )
        thread.start()
        return thread

    def _copy(self, output: IO[bytes], log: Path) -> None:
        text = LogText()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "ab", buffering=0) as file, output:
            while chunk := os.read(output.fileno(), 65536):
                self._write(chunk)
                # A full disk must not stop rank 0 by filling its pipe.
                with contextlib.suppress(OSError):
                    file.write(text.feed(chunk))
            with contextlib.suppress(OSError):
                file.write(text.end())

    def _write(self, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            buffer = getattr(self._stream, "buffer", None)
            if buffer is None:  # a captured stream
                self._stream.write(data.decode(errors="replace"))
            else:
                buffer.write(data)
            self._stream.flush()


class LogText:
    """Turns a terminal's bytes into lines for a log: without colours, and with only the last state
    of a line that was redrawn.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """The whole lines that ``data`` completes."""
        *lines, rest = (self._pending + data).split(b"\n")
        self._pending = rest.rsplit(b"\r", 1)[-1] if b"\r" in rest[:-1] else rest
        return b"".join(_last_state(line) + b"\n" for line in lines)

    def end(self) -> bytes:
        """The rest, which has no end of line."""
        return _ESCAPES.sub(b"", self._pending)


def _last_state(line: bytes) -> bytes:
    return _ESCAPES.sub(b"", line.rstrip(b"\r").rsplit(b"\r", 1)[-1])
