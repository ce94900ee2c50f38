"""Keeps one server going: starts it, gives it the weights, notices that it died or hangs, starts
another.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.launch.rollout_nodes import Address
from trainer.rollout.vllm.client.status_file import Notice, Seat
from trainer.rollout.vllm.server.serve import SECRET
from trainer.rollout.vllm.server.shared_weights import Arrival, SharedWeights

POLL_S = 0.1
HEALTH_S = 1.0
"""Seconds between two questions after a server's health."""
RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Seconds, and restarts in a row."""

    start_timeout_s: float
    timeout_s: float
    max_restarts: int


class Kept:
    """The weights that servers are to have; one for all keepers of a node."""

    def __init__(self) -> None:
        self.shared = SharedWeights()
        self.version: int | None = None
        self._changed = threading.Condition()
        self._readers = 0

    def write(self, weights: Iterable[Arrival], version: int) -> None:
        """Replace them, as soon as no server is reading."""
        with self._changed:
            self._changed.wait_for(lambda: self._readers == 0)
            self.version = None
            self.shared.write(weights)
            self.version = version

    @contextmanager
    def reading(self) -> Iterator[int | None]:
        """Within they stay as they are; their version."""
        with self._changed:
            self._readers += 1
            version = self.version
        try:
            yield version
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()


class Keeper(threading.Thread):
    """Server ``number`` of ``notice``. Its thread lives as long as the server may: the server dies
    with it.
    """

    def __init__(
        self,
        number: int,
        arguments: dict[str, Any],
        *,
        folder: Path,
        env: dict[str, str],
        limits: Limits,
        notice: Notice,
        host: str,
        token: str,
        kept: Kept,
        module: str = "trainer.rollout.vllm.server.serve",
    ) -> None:
        """``host``: the address that it listens on, to those who know ``token``."""
        super().__init__(name=f"vllm-server-{number}", daemon=True)
        self.number, self.arguments, self.folder, self.env, self.limits = (
            number,
            arguments,
            folder,
            env,
            limits,
        )
        self.notice, self.kept = notice, kept
        self._host, self._token, self._module = host, token, module
        self._process: subprocess.Popen[bytes] | None = None
        self._address: Address | None = None
        self._version: int | None = None
        self._incarnation = self._restarts = 0
        self._asked = self._healthy = 0.0
        self._closing = threading.Event()
        self._due = threading.Event()
        """Set when there is something to do at once."""

    @property
    def pid(self) -> int | None:
        """Of the server, while there is one."""
        return None if self._process is None else self._process.pid

    def renew(self) -> None:
        """A step went by, and there are other weights: restarts are counted anew."""
        self._restarts = 0
        self._due.set()

    def close(self) -> None:
        """End the server and this thread."""
        self._closing.set()
        self._due.set()
        self.join(timeout=30.0)

    def run(self) -> None:
        """Until closed, refused or failed."""
        try:
            while not self._closing.is_set() and self._turn():
                self._due.wait(POLL_S)
                self._due.clear()
        except Exception as error:
            self.notice.give_up(failed=f"server {self.number} could not be kept: {error}")
        finally:
            self._end()

    def _turn(self) -> bool:
        """One look at the server, and what follows of it; False when there is nothing left to
        do.
        """
        if self._process is None:
            return self._start()
        if (why := self._broken()) is not None:
            return self._restart(why)
        if (
            self.kept.version not in (None, self._version)
            and (why := self._send_weights()) is not None
        ):
            return self._restart(why)
        return True

    def _start(self) -> bool:
        self._incarnation += 1
        name = f"server_{self.number}.{self._incarnation}"
        ready, log = self.folder / f"{name}.ready", self.folder / f"{name}.log"
        spec = self.folder / f"server_{self.number}.json"
        ready.unlink(missing_ok=True)
        spec.touch(mode=0o600)
        wanted = {
            "parent": os.getpid(),
            "ready": str(ready),
            "host": self._host,
            "arguments": self.arguments,
        }
        spec.write_text(json.dumps(wanted))
        log.touch(mode=0o600)
        inherited = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module, str(spec)],
                env=inherited | self.env | {SECRET: self._token},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        told = self._wait_for(ready)
        if told is None:
            return self._closing.is_set() or self._restart(
                f"it was not ready within {self.limits.start_timeout_s:g} s"
            )
        if "refused" in told:
            self.notice.give_up(refused=str(told["refused"]))
            return False
        if "port" not in told:
            return self._restart("it ended before it was ready")
        self._address, self._version = (
            Address(host=self._host, port=int(told["port"]), token=self._token),
            None,
        )
        self._healthy = time.monotonic()
        self._tell()
        return True

    def _wait_for(self, ready: Path) -> dict[str, Any] | None:
        deadline = time.monotonic() + self.limits.start_timeout_s
        while time.monotonic() < deadline and not self._closing.wait(POLL_S):
            ended = self._process is None or self._process.poll() is not None
            with contextlib.suppress(FileNotFoundError):
                found: dict[str, Any] = json.loads(ready.read_text())
                return found
            if ended:
                return {}
        return None

    def _broken(self) -> str | None:
        """Why the server has to go, or None."""
        if self._process is not None and (code := self._process.poll()) is not None:
            return f"it ended with code {code}"
        now = time.monotonic()
        if now - self._asked < HEALTH_S:
            return None
        self._asked = now
        health = self._ask("GET", "/health", timeout_s=min(5.0, self.limits.timeout_s))
        if health is not None:
            self._healthy = now
            if health["stuck_s"] > self.limits.timeout_s:
                return f"it made no token for {health['stuck_s']:.0f} s"
        elif now - self._healthy > self.limits.timeout_s:
            return f"it gave no answer for {now - self._healthy:.0f} s"
        return None

    def _send_weights(self) -> str | None:
        """Let the server read what is kept. Why that went wrong, or None."""
        with self.kept.reading() as version:
            asked = {
                "path": self.kept.shared.path,
                "table": self.kept.shared.table,
                "version": version,
            }
            answer = self._ask("POST", "/weights", asked, timeout_s=self.limits.start_timeout_s)
        if answer is None or "error" in answer:
            return f"it did not take the weights ({'no answer' if answer is None else answer['error']})"
        self._version = version
        self._healthy = time.monotonic()
        self._tell()
        return None

    def _restart(self, why: str) -> bool:
        self._end()
        if self._closing.is_set():
            return False
        self._restarts += 1
        log = self.folder / f"server_{self.number}.{self._incarnation}.log"
        if self._restarts > self.limits.max_restarts:
            self.notice.give_up(
                failed=f"vLLM server {self.number} could not be brought back: {why}, and "
                f"actor_rollout_ref.rollout.max_restarts={self.limits.max_restarts} restarts in a "
                "row are used up; "
                f"its log is {log}"
            )
            return False
        self._tell(restarted=True)
        return True

    def _end(self) -> None:
        process, self._process, self._address, self._version = self._process, None, None, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _tell(self, *, restarted: bool = False) -> None:
        seat = Seat(address=self._address, version=self._version, incarnation=self._incarnation)
        self.notice.sit(self.number, seat, restarted=restarted)

    def _ask(
        self, method: str, path: str, value: dict[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any] | None:
        return (
            None
            if self._address is None
            else ask(self._address, method, path, value, timeout_s=timeout_s)
        )


def ask(
    of: Address, method: str, path: str, value: dict[str, Any] | None = None, *, timeout_s: float
) -> dict[str, Any] | None:
    """A server's answer, or None when there is none."""
    try:
        return request(of, method, path, value, timeout_s=timeout_s)
    except (OSError, http.client.HTTPException, ValueError):
        return None


def request(
    of: Address, method: str, path: str, value: dict[str, Any] | None = None, *, timeout_s: float
) -> dict[str, Any]:
    """What ``of`` answers, refusals too. Raises OSError, HTTPException or ValueError when it
    doesn't.
    """
    connection = http.client.HTTPConnection(of.host, of.port, timeout=timeout_s)
    try:
        body = None if value is None else json.dumps(value)
        connection.request(method, path, body, {"Authorization": f"Bearer {of.token}"})
        found: dict[str, Any] = json.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()
