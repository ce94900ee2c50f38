"""The process of a server: its start, its readiness and its end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.base.json_files import read_object
from trainer.rollout.vllm.server.serve import TOKEN_VARIABLE

POLL_S = 0.1
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables of the trainer's ranks, which vLLM would take for its own."""


class ServerProcess:
    """One process of server ``slot``, the ``incarnation``-th; it dies with the thread that made it.

    ``folder`` is private. The server listens on address ``host``, to clients that know ``token``.
    """

    def __init__(
        self,
        slot: int,
        incarnation: int,
        engine_args: dict[str, Any],
        *,
        folder: Path,
        env: dict[str, str],
        host: str,
        token: str,
        module: str,
    ) -> None:
        """Start the process, without waiting until it is ready."""
        name = f"server_{slot}.{incarnation}"
        self.log = folder / f"{name}.log"
        self._ready = folder / f"{name}.ready"
        self._ready.unlink(missing_ok=True)
        spec = folder / f"server_{slot}.json"
        spec.touch(mode=0o600)
        settings = {
            "parent": os.getpid(),
            "ready": str(self._ready),
            "host": host,
            "arguments": engine_args,
        }
        spec.write_text(json.dumps(settings))
        self.log.touch(mode=0o600)
        inherited = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(spec)],
                env=inherited | env | {TOKEN_VARIABLE: token},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    def wait_until_ready(
        self, timeout_s: float, cancelled: threading.Event
    ) -> dict[str, Any] | None:
        """Return what the server reports: its ``port``, or what is ``refused``.

        Returns an empty dictionary when the process ends before, None after ``timeout_s`` or when
        ``cancelled`` is set.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not cancelled.wait(POLL_S):
            ended = self.exit_code is not None  # looked at first: its last act may be to report
            report = read_object(self._ready)
            if report:
                return report
            if ended:
                return {}
        return None

    def kill(self) -> None:
        """End the process and its children, and wait for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
