"""One rank as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from trainer.launch.error_file import read_error


@dataclass
class RankProcess:
    """The process of one rank, its log and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    error_file: Path
    output_thread: threading.Thread | None = None
    """Copies rank 0's output to the screen; None for the other ranks."""
    parent_pipe: int | None = None
    """Write end of the pipe by which the ranks notice the launcher's end; held by one of them."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    ended_at: float = 0.0
    """time.time() when it ended."""

    def send(self, number: int) -> None:
        """Signal the rank itself."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kill the rank and everything in its process group, such as its data-loader workers."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def final_code(self) -> int:
        """Its exit code, or the one in its error file when it was killed on its way out."""
        code = 1 if self.code is None else self.code
        if code >= 0:
            return code
        error = read_error(self.error_file)
        return code if error is None else error.code

    def error_time(self) -> float:
        """time.time() of its failure: the one in its error file, else its end."""
        error = read_error(self.error_file)
        return self.ended_at if error is None else error.time
