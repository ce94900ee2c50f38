"""The processes that send a run's metrics to its loggers, as the trainer sees them."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.base.run_folder import send_command

CLOSE_S = 15.0
"""How long the end of a run may wait for its loggers, all together."""


class Followers:
    """One process for each logger. No method raises, and only ``close`` waits."""

    def __init__(self, run_dir: Path, names: Sequence[str], tell: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._tell = tell
        self._processes: dict[str, subprocess.Popen[str]] = {}
        for name in names:
            try:
                self._processes[name] = subprocess.Popen(
                    [*send_command(run_dir, name, sys.executable), "--live"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    text=True,
                )
            except OSError as error:
                tell(f"[WARNING] {name} can't be started ({error.strerror}): the run goes on")

    def close(self, exit_code: int) -> None:
        """Let the loggers have the rest, and say what to type for those that don't take it."""
        for process in self._processes.values():
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.write(f"{exit_code}\n")
                process.stdin.close()
        deadline = time.monotonic() + CLOSE_S
        for name, process in self._processes.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                command = shlex.join(send_command(self._run_dir, name))
                self._tell(f"[WARNING] {name} hasn't everything of this run. Type later: {command}")
        self._processes = {}
