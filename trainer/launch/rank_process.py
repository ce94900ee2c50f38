"""One rank as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import EXIT_OK, EXIT_REQUEUE
from trainer.base.rank_records import FAILED, FINISHED, RankEnd, read_end


@dataclass
class RankProcess:
    """The process of one rank, its log and how it ended."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path
    end_file: Path
    """The record of its end, which it writes itself."""
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
        """Its exit code, or the one in its record when it was killed on its way out; 1 for a rank
        that exited with 0 before it had finished.
        """
        code = 1 if self.code is None else self.code
        end = self.end
        if code < 0 and end is not None:
            return end.exit_code
        return 1 if self.left_early else code

    def error_time(self) -> float:
        """time.time() of its failure: the one in its record, else its end."""
        end = self.end
        return self.ended_at if end is None else end.time

    @property
    def end(self) -> RankEnd | None:
        """Its record of its end; None before, and when it left none."""
        return read_end(self.end_file)

    @property
    def has_failed(self) -> bool:
        """Whether it has recorded an error, though it may hang on its way out."""
        end = self.end
        return end is not None and end.kind in FAILED

    @property
    def left_early(self) -> bool:
        """Whether it exited with 0, but did not finish what it was to do."""
        end = self.end
        return self.code == EXIT_OK and (end is None or end.kind != FINISHED)

    @property
    def ended_in_order(self) -> bool:
        """Whether it has finished, or has saved and left."""
        return self.final_code() in (EXIT_OK, EXIT_REQUEUE)
