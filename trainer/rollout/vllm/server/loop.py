"""The loop of a server's only thread that uses vLLM.

It steps the engine, and between steps runs the functions that HTTP threads submit.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.core import Core, RequestOutput
from trainer.rollout.vllm.engine.requests import Request

T = TypeVar("T")
HEARTBEAT_S = 0.5
"""Seconds between two heartbeats to clients that wait for responses."""
SEPARATOR = "/"
"""Between the call and the request id, in the engine's id of a request."""


class WrongWeightsError(Exception):
    """The weights have changed, or a new server has none yet: the client has to ask again."""


class GenerateCall:
    """The requests of one ``/generate`` stream, and the lines to send for them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.unfinished: set[str] = set()
        """Ids of requests in the engine."""
        self._outbox: queue.Queue[dict[str, Any]] = queue.Queue()

    def put(self, line: dict[str, Any]) -> None:
        """Add a line. One with the key ``end`` is the last."""
        self._outbox.put(line)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield lines, up to and including the last; blocks while there is none."""
        while True:
            line = self._outbox.get()
            yield line
            if "end" in line:
                return


class EngineLoop:
    """The engine of a server. The main thread calls ``run``, HTTP threads everything else."""

    def __init__(self, core: Core, *, max_num_seqs: int) -> None:
        self._core = core
        self._max_num_seqs = max_num_seqs
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: dict[str, GenerateCall] = {}
        self._last_turn = math.inf
        """When the loop last went on; infinity while it is idle."""
        self._last_heartbeat = 0.0
        self._steps = 0
        self._busy_rows = 0
        self.version: int | None = None
        """Of the weights; None before there are any, and while they are loaded."""

    def stalled_s(self) -> float:
        """Return for how long the loop has not gone on, seconds; 0 while it is idle."""
        return max(0.0, time.monotonic() - self._last_turn)

    def generate(
        self,
        name: str,
        requests: Sequence[Request],
        sampling: Sampling,
        eos_ids: Sequence[int],
        version: int,
    ) -> GenerateCall:
        """Begin ``requests`` as call ``name``.

        Raises :class:`WrongWeightsError` when the weights are not ``version``, and vLLM's error for
        a request that it can't take.
        """

        def begin() -> GenerateCall:
            if version != self.version:
                raise WrongWeightsError(f"the weights are version {self.version}, not {version}")
            call = GenerateCall(name)
            try:
                for request in requests:
                    engine_id = f"{name}{SEPARATOR}{request.request_id}"
                    self._core.add_request(request.with_id(engine_id), sampling, eos_ids)
                    call.unfinished.add(engine_id)
            except Exception:
                self._core.abort_requests(call.unfinished)
                raise
            self._calls[name] = call
            if not call.unfinished:
                self._finish(call)
            return call

        return self._submit(begin)

    def stop(self, name: str) -> None:
        """End call ``name`` early; its last lines hold the tokens of its unfinished requests."""

        def abort() -> None:
            call = self._calls.get(name)
            if call is not None:
                outputs = self._core.abort_requests(call.unfinished)
                call.put({"partial": [_to_json(output) for output in outputs]})
                self._finish(call)

        self._submit(abort)

    def load_weights(self, path: str, table: str, version: int) -> None:
        """Load weights from shared memory.

        Ends all calls under way, which would continue with other weights.
        """

        def load() -> None:
            for call in list(self._calls.values()):
                self._core.abort_requests(call.unfinished)
                self._finish(call)
            self.version = None
            self._core.load_shared_weights(path, table)
            self.version = version

        self._submit(load)

    def run(self) -> None:
        """Run until the process is ended.

        Raises what vLLM raises in a step: the supervisor of this server then starts another.
        """
        while True:
            self._run_submitted(wait=self._core.num_unfinished == 0)
            self._last_turn = time.monotonic()
            if self._core.num_unfinished:
                self._step()

    def _step(self) -> None:
        self._busy_rows += min(self._max_num_seqs, self._core.num_unfinished)
        self._steps += 1
        for output in self._core.step():
            call = self._calls[output.request_id.split(SEPARATOR, 1)[0]]
            call.unfinished.discard(output.request_id)
            call.put({"done": [_to_json(output)]})
            if not call.unfinished:
                self._finish(call)
        now = time.monotonic()
        if now - self._last_heartbeat > HEARTBEAT_S:
            self._last_heartbeat = now
            for call in self._calls.values():
                call.put({"heartbeat": self._steps})

    def _finish(self, call: GenerateCall) -> None:
        del self._calls[call.name]
        call.put({"end": {"steps": self._steps, "busy_rows": self._busy_rows}})
        if not self._calls:
            self._steps = 0
            self._busy_rows = 0

    def _run_submitted(self, *, wait: bool) -> None:
        """Run all submitted functions; with ``wait`` at least one."""
        while wait or not self._inbox.empty():
            self._last_turn = math.inf  # waiting in an empty inbox is no stall
            function = self._inbox.get()
            self._last_turn = time.monotonic()
            function()
            wait = False

    def _submit(self, function: Callable[[], T]) -> T:
        """Let the main thread run ``function``; return what it returns, or raise what it raises."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future.result()


def _to_json(output: RequestOutput) -> list[Any]:
    """Return the fields of :class:`RequestOutput`, under the request id that the client knows."""
    request_id = output.request_id.split(SEPARATOR, 1)[1]
    return [request_id, output.token_ids, output.log_probs, output.finish_reason]
