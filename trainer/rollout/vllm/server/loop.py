"""The one thread of a server that touches vLLM: it takes steps, and between them does what HTTP
threads ask for.
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.core import Core, Drawn
from trainer.rollout.vllm.engine.requests import Request

T = TypeVar("T")
ALIVE_S = 0.5
"""Seconds between two signs of life to those who wait for tokens."""
SEPARATOR = "/"


class WrongWeightsError(Exception):
    """They changed, or a new server has none yet: ask again."""


class Call:
    """The requests of one stream. ``lines`` is what its HTTP thread sends, the last one with an
    ``end``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.open: set[str] = set()
        self._outbox: queue.Queue[dict[str, Any]] = queue.Queue()

    def put(self, line: dict[str, Any]) -> None:
        """One more line."""
        self._outbox.put(line)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Lines until the last."""
        while True:
            line = self._outbox.get()
            yield line
            if "end" in line:
                return


class Loop:
    """``run`` belongs to the main thread, everything else to any."""

    def __init__(self, core: Core, *, rows: int) -> None:
        self._core, self._rows = core, rows
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._calls: dict[str, Call] = {}
        self._turned = math.inf
        self._told = 0.0
        self._steps = self._busy = 0
        self.version: int | None = None

    def stuck_s(self) -> float:
        """Seconds since the loop last turned; 0 while it has nothing to do."""
        return max(0.0, time.monotonic() - self._turned)

    def generate(
        self,
        name: str,
        requests: Sequence[Request],
        sampling: Sampling,
        eos_ids: Sequence[int],
        version: int,
    ) -> Call:
        """Begin ``requests``. Raises :class:`WrongWeightsError` when the weights are not
        ``version``, and what vLLM raises for a request that it can't take.
        """

        def begin() -> Call:
            if version != self.version:
                raise WrongWeightsError(f"the weights are version {self.version}, not {version}")
            call = Call(name)
            try:
                for request in requests:
                    key = f"{name}{SEPARATOR}{request.key}"
                    self._core.add(request.renamed(key), sampling, eos_ids)
                    call.open.add(key)
            except Exception:
                self._core.abort(call.open)
                raise
            self._calls[name] = call
            if not call.open:
                self._finish(call)
            return call

        return self._do(begin)

    def stop(self, name: str) -> None:
        """End a call early; its last lines hold what came of the requests that were open."""

        def end() -> None:
            call = self._calls.get(name)
            if call is not None:
                call.put({"partial": [_plain(d) for d in self._core.abort(call.open)]})
                self._finish(call)

        self._do(end)

    def load(self, path: str, table: str, version: int) -> None:
        """Take the weights in shared memory. Calls under way are ended: they would go on with other
        weights.
        """

        def take() -> None:
            for call in list(self._calls.values()):
                self._core.abort(call.open)
                self._finish(call)
            self.version = None
            self._core.load_shared(path, table)
            self.version = version

        self._do(take)

    def run(self) -> None:
        """Until the process is ended. An error of vLLM's is raised: whoever keeps the server starts
        another.
        """
        while True:
            self._do_what_is_asked(wait=not self._core.open)
            self._turned = time.monotonic()
            if self._core.open:
                self._step()

    def _step(self) -> None:
        self._busy += min(self._rows, self._core.open)
        self._steps += 1
        for drawn in self._core.step():
            call = self._calls[drawn.key.split(SEPARATOR, 1)[0]]
            call.open.discard(drawn.key)
            call.put({"done": [_plain(drawn)]})
            if not call.open:
                self._finish(call)
        now = time.monotonic()
        if now - self._told > ALIVE_S:
            self._told = now
            for call in self._calls.values():
                call.put({"alive": self._steps})

    def _finish(self, call: Call) -> None:
        del self._calls[call.name]
        call.put({"end": {"steps": self._steps, "busy": self._busy}})
        if not self._calls:
            self._steps = self._busy = 0

    def _do_what_is_asked(self, *, wait: bool) -> None:
        while wait or not self._inbox.empty():
            self._turned = math.inf  # idle is not stuck
            what = self._inbox.get()
            self._turned = time.monotonic()
            what()
            wait = False

    def _do(self, what: Callable[[], T]) -> T:
        """Let the main thread do ``what`` and give what it gives."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(what())
            except Exception as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future.result()


def _plain(drawn: Drawn) -> list[Any]:
    return [drawn.key.split(SEPARATOR, 1)[1], drawn.token_ids, drawn.log_probs, drawn.reason]
