"""The supervision of one server: start it, give it weights, restart it when it dies or hangs."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from trainer.base.connections import Address
from trainer.rollout.vllm.client.json_request import try_send_json
from trainer.rollout.vllm.client.server_process import POLL_S, ServerProcess
from trainer.rollout.vllm.client.spec import ServerSpec
from trainer.rollout.vllm.client.status_file import ServerStatus, StatusFile
from trainer.rollout.vllm.client.weight_store import WeightStore

HEALTH_INTERVAL_S = 1.0
HEALTH_TIMEOUT_S = 5.0
JOIN_TIMEOUT_S = 30.0


class ServerSupervisor(threading.Thread):
    """Keeps server ``slot`` of ``spec`` running and its status in ``status_file`` up to date.

    The server dies with this thread.
    """

    def __init__(
        self,
        slot: int,
        spec: ServerSpec,
        *,
        folder: Path,
        status_file: StatusFile,
        host: str,
        token: str,
        weights: WeightStore,
    ) -> None:
        """``host``: the address on which the server listens, to clients that know ``token``."""
        super().__init__(name=f"vllm-server-{slot}", daemon=True)
        self.slot = slot
        self.spec = spec
        self.limits = spec.limits
        self.folder = folder
        self.status_file = status_file
        self.weights = weights
        self._host = host
        self._token = token
        self._process: ServerProcess | None = None
        self._address: Address | None = None
        self._version: int | None = None
        self._incarnation = 0
        self._restarts = 0
        self._last_health_check = 0.0
        self._last_reply = 0.0
        self._closing = threading.Event()
        self._wake = threading.Event()
        """Set when there is something to do at once."""

    @property
    def pid(self) -> int | None:
        """Process id of the server; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    def weights_changed(self) -> None:
        """Send the new weights soon, and allow ``max_restarts`` restarts again."""
        self._restarts = 0
        self._wake.set()

    def close(self) -> None:
        """End the server and this thread."""
        self._closing.set()
        self._wake.set()
        self.join(timeout=JOIN_TIMEOUT_S)

    def run(self) -> None:
        """Supervise until closed, or until the server is refused or can't be restarted."""
        try:
            while not self._closing.is_set() and self._check():
                self._wake.wait(POLL_S)
                self._wake.clear()
        except Exception as error:
            self.status_file.fail(failed=f"server {self.slot} could not be supervised: {error}")
        finally:
            self._kill()

    def _check(self) -> bool:
        """Look at the server once and act on it; False when there will be no more servers."""
        if self._process is None:
            return self._start()
        fault = self._fault()
        if fault is None and self.weights.version not in (None, self._version):
            fault = self._send_weights()
        return True if fault is None else self._restart(fault)

    def _start(self) -> bool:
        """Start a server and wait until it is ready; False when there will be no more servers."""
        self._incarnation += 1
        self._process = ServerProcess(
            self.slot,
            self._incarnation,
            self.spec.engine_args,
            folder=self.folder,
            env=self.spec.environments[self.slot],
            host=self._host,
            token=self._token,
            module=self.spec.module,
        )
        report = self._process.wait_until_ready(self.limits.start_timeout_s, self._closing)
        if self._closing.is_set():
            return False
        if report is None:
            return self._restart(f"it was not ready within {self.limits.start_timeout_s:g} s")
        if "refused" in report:
            self.status_file.fail(refused=str(report["refused"]))
            return False
        if "port" not in report:
            return self._restart("it ended before it was ready")
        self._address = Address(host=self._host, port=int(report["port"]), token=self._token)
        self._version = None
        self._last_reply = time.monotonic()
        self._write_status()
        return True

    def _fault(self) -> str | None:
        """Return why the server has to be replaced; None when it need not be."""
        if self._process is not None and self._process.exit_code is not None:
            return f"it ended with code {self._process.exit_code}"
        now = time.monotonic()
        if now - self._last_health_check < HEALTH_INTERVAL_S:
            return None
        self._last_health_check = now
        timeout_s = min(HEALTH_TIMEOUT_S, self.limits.timeout_s)
        health = self._request("GET", "/health", timeout_s=timeout_s)
        if health is not None:
            self._last_reply = now
            if health["stalled_s"] > self.limits.timeout_s:
                return f"it made no token for {health['stalled_s']:.0f} s"
        elif now - self._last_reply > self.limits.timeout_s:
            return f"it gave no answer for {now - self._last_reply:.0f} s"
        return None

    def _send_weights(self) -> str | None:
        """Let the server read the stored weights; return why that failed, None when it did not."""
        with self.weights.reading() as version:
            shared = self.weights.shared
            body = {"path": shared.path, "table": shared.table, "version": version}
            reply = self._request("POST", "/weights", body, timeout_s=self.limits.start_timeout_s)
        if reply is None:
            return "it did not take the weights (no answer)"
        if "error" in reply:
            return f"it did not take the weights ({reply['error']})"
        self._version = version
        self._last_reply = time.monotonic()
        self._write_status()
        return None

    def _restart(self, fault: str) -> bool:
        """Let the next check start another server; False when no restart is left."""
        log = None if self._process is None else self._process.log
        self._kill()
        if self._closing.is_set():
            return False
        self._restarts += 1
        if self._restarts > self.limits.max_restarts:
            self.status_file.fail(
                failed=f"vLLM server {self.slot} could not be brought back: {fault}, and "
                f"actor_rollout_ref.rollout.max_restarts={self.limits.max_restarts} restarts in a "
                f"row are used up; its log is {log}"
            )
            return False
        self._write_status(restarted=True)
        return True

    def _kill(self) -> None:
        process = self._process
        self._process = None
        self._address = None
        self._version = None
        if process is not None:
            process.kill()

    def _write_status(self, *, restarted: bool = False) -> None:
        server = ServerStatus(
            address=self._address, version=self._version, incarnation=self._incarnation
        )
        self.status_file.update(self.slot, server, restarted=restarted)

    def _request(
        self, method: str, path: str, value: dict[str, Any] | None = None, *, timeout_s: float
    ) -> dict[str, Any] | None:
        if self._address is None:
            return None
        return try_send_json(self._address, method, path, value, timeout_s=timeout_s)
