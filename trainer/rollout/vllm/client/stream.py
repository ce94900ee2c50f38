"""One call to one server: requests go out, responses come in.

A server that is lost is waited for and called again. A response counts when all of it has come; one
that a lost server had begun is drawn again with the same random numbers, so none comes twice.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from typing import Any

from trainer.base.connections import Address
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.client.json_request import try_send_json
from trainer.rollout.vllm.client.spec import ServerLimits
from trainer.rollout.vllm.client.status_file import PoolStatus
from trainer.rollout.vllm.engine.core import RequestOutput
from trainer.rollout.vllm.engine.requests import Request

POLL_S = 0.05


class ServerLost(Exception):
    """There will be no server for these requests any more."""


@dataclass(frozen=True)
class StreamEvent:
    """What a stream reports to the thread that consumes its responses."""

    outputs: list[RequestOutput] = field(default_factory=list)
    ended: bool = False
    """Nothing more comes from this stream."""
    failed: str = ""
    """Why it ended before all responses had come; empty: not so."""
    steps: int = 0
    """Of the server during the call."""
    busy_rows: int = 0
    """Sum over these steps of the rows in use."""


class Stream(threading.Thread):
    """The requests of a generation that go to one server; its events go to a queue."""

    def __init__(
        self,
        read_status: Callable[[], PoolStatus | None],
        slot: int,
        requests: Sequence[Request],
        sampling: Sampling,
        eos_ids: Sequence[int],
        *,
        version: int,
        limits: ServerLimits,
        events: queue.SimpleQueue[StreamEvent],
    ) -> None:
        """``version``: the weights that the server in ``slot`` must have."""
        super().__init__(name=f"vllm-stream-{slot}", daemon=True)
        self._read_status = read_status
        self._slot = slot
        self._sampling = sampling
        self._eos_ids = list(eos_ids)
        self._unfinished = {request.request_id: request for request in requests}
        self._version = version
        self._limits = limits
        self._events = events
        self._stopping = threading.Event()
        self._call: tuple[Address, str] | None = None
        """Server and name of the call under way."""

    def run(self) -> None:
        """Call until every response has come, the stream is stopped, or there is no server left."""
        last_event = StreamEvent(ended=True)
        try:
            last_event = self._generate()
        except ServerLost as error:
            last_event = StreamEvent(ended=True, failed=str(error))
        except Exception as error:
            last_event = StreamEvent(ended=True, failed=f"{type(error).__name__}: {error}")
        finally:
            self._events.put(last_event)

    def stop(self) -> None:
        """Let the server send the tokens of unfinished requests, and end. Does not wait."""
        self._stopping.set()
        call = self._call
        if call is not None:
            address, name = call
            threading.Thread(
                target=try_send_json,
                args=(address, "POST", "/stop", {"call": name}),
                kwargs={"timeout_s": self._limits.timeout_s},
                daemon=True,
            ).start()

    def _generate(self) -> StreamEvent:
        """Call servers until nothing is unfinished; return the last event of the stream."""
        last_event = StreamEvent(ended=True)
        while self._unfinished and not self._stopping.is_set():
            server = self._wait_for_server()
            if server is None:  # stopped
                break
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                for line in self._lines(server):
                    self._report_outputs(line)
                    if "end" in line:
                        last_event = StreamEvent(
                            ended=True,
                            steps=line["end"]["steps"],
                            busy_rows=line["end"]["busy_rows"],
                        )
        return last_event

    def _report_outputs(self, line: dict[str, Any]) -> None:
        """Put the finished and partial responses of a line into the queue."""
        done = [RequestOutput(*fields) for fields in line.get("done", [])]
        for output in done:
            self._unfinished.pop(output.request_id)
        if done:
            self._events.put(StreamEvent(done))
        if "partial" in line:
            self._events.put(StreamEvent([RequestOutput(*fields) for fields in line["partial"]]))

    def _wait_for_server(self) -> Address | None:
        """Return the server as soon as it has the right weights; None when stopped.

        Raises ServerLost when there is none any more, or none comes back in time.
        """
        timeout_s = self._limits.start_timeout_s + self._limits.timeout_s
        deadline = time.monotonic() + timeout_s
        incarnation = -1
        while not self._stopping.wait(POLL_S if incarnation >= 0 else 0):
            status = self._read_status()
            if status is not None and (status.failed or status.refused):
                raise ServerLost(status.failed or status.refused)
            server = None if status is None else status.slots[self._slot]
            has_weights = server is not None and server.version == self._version
            if server is not None and server.address is not None and has_weights:
                return server.address
            current = 0 if server is None else server.incarnation
            if current != incarnation:  # each start has the whole time
                incarnation = current
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise ServerLost(
                    f"vLLM server {self._slot} did not come back with the weights of step "
                    f"{self._version}"
                )
        return None

    def _lines(self, server: Address) -> Iterator[dict[str, Any]]:
        """Yield what the server sends, line by line.

        Raises OSError after ``timeout_s`` without a line, and when its weights are not the right
        ones; RuntimeError when it refuses a request.
        """
        name = secrets.token_hex(8)
        connection = http.client.HTTPConnection(
            server.host, server.port, timeout=self._limits.timeout_s
        )
        try:
            body = {
                "call": name,
                "requests": [asdict(request) for request in self._unfinished.values()],
                "sampling": asdict(self._sampling),
                "eos_ids": self._eos_ids,
                "version": self._version,
            }
            connection.request(
                "POST", "/generate", json.dumps(body), {"Authorization": f"Bearer {server.token}"}
            )
            reply = connection.getresponse()
            if reply.status != HTTPStatus.OK:
                text = reply.read().decode(errors="replace")
                if reply.status != HTTPStatus.CONFLICT:
                    raise RuntimeError(f"a vLLM server refused a request: {text}")
                time.sleep(POLL_S)  # its weights are changing, which the status shows soon
                raise OSError(text)
            self._call = (server, name)
            if self._stopping.is_set():
                self.stop()
            for text_line in iter(reply.readline, b""):
                yield json.loads(text_line)
        finally:
            self._call = None
            connection.close()
