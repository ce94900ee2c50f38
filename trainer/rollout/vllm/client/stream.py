"""One call to one server: requests go out, responses come in, and a server that is lost is waited
for and asked again.

Whoever draws reads events from a queue. A response counts when all of it has come, so that what a
lost server had begun is drawn again by the same random numbers, and nothing twice.
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

from trainer.launch.rollout_nodes import Address
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.client.status_file import State
from trainer.rollout.vllm.client.supervisor import Limits, ask
from trainer.rollout.vllm.engine.core import Drawn
from trainer.rollout.vllm.engine.requests import Request

POLL_S = 0.05


@dataclass(frozen=True)
class Event:
    """What a stream has to tell."""

    drawn: list[Drawn] = field(default_factory=list)
    ended: bool = False
    """Nothing more comes from this stream."""
    failed: str = ""
    steps: int = 0
    busy: int = 0


class Stream(threading.Thread):
    """Requests for server ``seat``, whose weights have to be ``version``."""

    def __init__(
        self,
        read: Callable[[], State | None],
        seat: int,
        requests: Sequence[Request],
        sampling: Sampling,
        eos_ids: Sequence[int],
        *,
        version: int,
        limits: Limits,
        events: queue.SimpleQueue[Event],
    ) -> None:
        """``read``: how the servers stand now."""
        super().__init__(name=f"vllm-stream-{seat}", daemon=True)
        self._read, self._seat, self._sampling, self._eos_ids = read, seat, sampling, list(eos_ids)
        self._open = {request.key: request for request in requests}
        self._version, self._limits, self._events = version, limits, events
        self._stopping = threading.Event()
        self._asked: tuple[Address, str] | None = None
        """Server and name of the call under way."""

    def run(self) -> None:
        """Until every response has come, the stream is stopped, or there is no server left."""
        event = Event(ended=True)
        try:
            event = self._draw()
        except Exception as error:
            event = Event(ended=True, failed=f"{type(error).__name__}: {error}")
        finally:
            self._events.put(event)

    def stop(self) -> None:
        """Let the server hand over what it has of the open responses, and end. Does not wait."""
        self._stopping.set()
        if (asked := self._asked) is not None:
            address, name = asked
            threading.Thread(
                target=ask,
                args=(address, "POST", "/stop", {"call": name}),
                kwargs={"timeout_s": self._limits.timeout_s},
                daemon=True,
            ).start()

    def _draw(self) -> Event:
        last = Event(ended=True)
        while self._open and not self._stopping.is_set():
            found = self._wait_for_server()
            if isinstance(found, str):
                return Event(ended=True, failed=found)
            if found is None:  # stopped
                break
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, KeyError):
                for line in self._lines(found):
                    if (drawn := [Drawn(*d) for d in line.get("done", [])]) != []:
                        for one in drawn:
                            self._open.pop(one.key)
                        self._events.put(Event(drawn))
                    if "partial" in line:
                        self._events.put(Event([Drawn(*d) for d in line["partial"]]))
                    if "end" in line:
                        last = Event(
                            ended=True, steps=line["end"]["steps"], busy=line["end"]["busy"]
                        )
        return last

    def _wait_for_server(self) -> Address | str | None:
        """The server, once it has the right weights; why there is none; None when stopped."""
        patience = self._limits.start_timeout_s + self._limits.timeout_s
        deadline, incarnation = time.monotonic() + patience, -1
        while not self._stopping.wait(POLL_S if incarnation >= 0 else 0):
            state = self._read()
            if state is not None and (state.failed or state.refused):
                return state.failed or state.refused
            seat = None if state is None else state.seats[self._seat]
            if seat is not None and seat.address is not None and seat.version == self._version:
                return seat.address
            now = max(0, -1 if seat is None else seat.incarnation)
            if now != incarnation:
                deadline, incarnation = time.monotonic() + patience, now
            elif time.monotonic() > deadline:
                return f"vLLM server {self._seat} did not come back with the weights of step {self._version}"
        return None

    def _lines(self, server: Address) -> Iterator[dict[str, Any]]:
        """What the server says, line by line. Raises OSError after ``timeout_s`` without one."""
        name = secrets.token_hex(8)
        connection = http.client.HTTPConnection(
            server.host, server.port, timeout=self._limits.timeout_s
        )
        try:
            body = {
                "call": name,
                "requests": [asdict(request) for request in self._open.values()],
                "sampling": asdict(self._sampling),
                "eos_ids": self._eos_ids,
                "version": self._version,
            }
            connection.request(
                "POST", "/generate", json.dumps(body), {"Authorization": f"Bearer {server.token}"}
            )
            answer = connection.getresponse()
            if answer.status != HTTPStatus.OK:
                said = answer.read().decode(errors="replace")
                if answer.status != HTTPStatus.CONFLICT:
                    raise RuntimeError(f"a vLLM server refused a request: {said}")
                time.sleep(POLL_S)  # its weights are changing: the state will say so
                raise OSError(said)
            self._asked = (server, name)
            if self._stopping.is_set():
                self.stop()
            while text := answer.readline():
                yield json.loads(text)
        finally:
            self._asked = None
            connection.close()
