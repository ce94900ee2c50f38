"""Answers under judgement while others are still generated."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any, Protocol

from trainer.data.forked import Forked, WorkerDied
from trainer.rewards.types import RewardRequest, Score

Worker = Forked[RewardRequest, Score]


class Workers(Protocol):
    """The processes that judge, and what their silence means."""

    timeout_s: float
    """Longest time of one answer."""

    def idle(self) -> list[Worker]:
        """All processes; none of them is at work."""

    def replace(self, worker: Worker) -> Worker:
        """A new process for one that is gone or hangs."""

    def close(self) -> None:
        """End the processes."""

    def unjudged(self, request: RewardRequest, why: str) -> Score:
        """The score of an answer that was given up; raises UserError where that is the user's to
        mend.
        """


@dataclass(kw_only=True)
class _Busy:
    worker: Worker
    at: int
    deadline: float


class Judging:
    """One round of answers: ``submit`` each as it comes, then ``results``. A thread of its own
    hands them to workers.

    ``quickly``: judges plain cases on the spot and returns None for the others. ``begin``: called
    once, in the caller's thread, before the first answer goes to a worker.
    """

    def __init__(
        self,
        workers: Workers,
        *,
        quickly: Callable[[RewardRequest], Score | None],
        begin: Callable[[], None],
    ) -> None:
        self._workers, self._quickly, self._begin = workers, quickly, begin
        self._scores: list[Score | None] = []
        self._queue: deque[tuple[int, RewardRequest]] = deque()
        self._requests: dict[int, RewardRequest] = {}
        self._hear, self._tell = Pipe(duplex=False)
        self._closing = self._cancelled = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.busy_s = 0.0
        """Seconds in which at least one worker was at work."""

    def submit(self, request: RewardRequest) -> None:
        """One more answer. Returns at once. Raises what ``results`` would, as soon as an answer
        before failed.
        """
        if self._error is not None:
            raise self._error
        score = self._quickly(request)
        self._scores.append(score)
        if score is not None:
            return
        if self._thread is None:
            self._begin()
            self._thread = threading.Thread(target=self._run, name="judging", daemon=True)
            self._thread.start()
        self._queue.append((len(self._scores) - 1, request))
        self._nudge()

    def results(self) -> list[Score]:
        """One score per answer, in the order of ``submit``, when all are judged.

        Raises UserError, naming the prompt, when a user's function fails.
        """
        self._end()
        if self._error is not None:
            self._workers.close()
            raise self._error
        return [score for score in self._scores if score is not None]

    def cancel(self) -> None:
        """Forget all of them; ends the workers, whose answers nobody may take for the next
        round's.
        """
        self._cancelled = True
        self._end()
        self._workers.close()

    def _end(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._nudge()
            self._thread.join()
        self._hear.close()
        self._tell.close()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):  # the thread ended by an error, which ``results`` raises
            self._tell.send_bytes(b"!")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            self._error = e

    def _serve(self) -> None:
        idle, busy = self._workers.idle(), list[_Busy]()
        while not self._cancelled and (self._queue or busy or not self._closing):
            while self._queue and idle:
                at, request = self._queue.popleft()
                self._requests[at] = request
                worker = self._send(idle.pop(), request)
                busy.append(
                    _Busy(worker=worker, at=at, deadline=time.monotonic() + self._workers.timeout_s)
                )
            began = time.monotonic()
            self._wait(busy)
            if busy:
                self.busy_s += time.monotonic() - began
            still: list[_Busy] = []
            for b in busy:
                if any(_ready(w) for w in b.worker.waits):
                    worker = self._take(b)
                elif time.monotonic() >= b.deadline:
                    worker = self._give_up(b, f"took longer than {self._workers.timeout_s:g} s")
                else:
                    still.append(b)
                    continue
                idle.append(worker)
            busy = still

    def _wait(self, busy: list[_Busy]) -> None:
        """Until an answer, a new request, the end, or the earliest deadline."""
        until = max(0.0, min(b.deadline for b in busy) - time.monotonic()) if busy else None
        things: list[Any] = [w for b in busy for w in b.worker.waits]
        ready = wait([*things, self._hear], until)
        if self._hear in ready:
            while self._hear.poll():
                self._hear.recv_bytes()

    def _send(self, worker: Worker, request: RewardRequest) -> Worker:
        """Hand a request over; to a new process when this one died while it was idle."""
        try:
            worker.send(request)
            return worker
        except WorkerDied:
            fresh = self._workers.replace(worker)
            fresh.send(request)
            return fresh

    def _take(self, b: _Busy) -> Worker:
        try:
            self._scores[b.at] = b.worker.receive(0)
            return b.worker
        except WorkerDied as e:
            return self._give_up(b, f"ended its process: {e}")

    def _give_up(self, b: _Busy, why: str) -> Worker:
        self._scores[b.at] = self._workers.unjudged(self._requests[b.at], why)
        return self._workers.replace(b.worker)


def _ready(thing: Any) -> bool:
    return bool(wait([thing], 0))
