"""Responses scored by worker processes while others are still being generated."""

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

from trainer.base import signals
from trainer.base.forked import Forked, WorkerDied
from trainer.rewards.types import RewardRequest, Score

Worker = Forked[RewardRequest, Score]


class WorkerPool(Protocol):
    """The worker processes of a ``Scorer``, and the score of a request that a worker failed."""

    timeout_s: float
    """Longest time for one response."""

    def idle(self) -> list[Worker]:
        """All workers; called while none of them is busy."""

    def replace(self, worker: Worker) -> Worker:
        """Return a new worker in place of one that died or hangs."""

    def close(self) -> None:
        """End the workers."""

    def failed_score(self, request: RewardRequest, reason: str) -> Score:
        """The score of a response whose worker failed. Raises UserError where that ends the run."""


@dataclass(kw_only=True)
class _Job:
    """A response that a worker is scoring."""

    worker: Worker
    index: int
    deadline: float


class ScoringRound:
    """One round of responses: ``submit`` each as it arrives, then take the ``results``. A thread
    passes them on to the workers.
    """

    def __init__(
        self,
        workers: WorkerPool,
        *,
        score_at_once: Callable[[RewardRequest], Score | None],
        start_workers: Callable[[], None],
    ) -> None:
        """``score_at_once`` scores simple cases in the caller's thread and returns None for others.
        ``start_workers`` is called there once, before the first request goes to a worker.
        """
        self._workers = workers
        self._score_at_once = score_at_once
        self._start_workers = start_workers
        self._scores: list[Score | None] = []
        self._queue: deque[tuple[int, RewardRequest]] = deque()
        self._requests: dict[int, RewardRequest] = {}
        self._wakeup_reader, self._wakeup_writer = Pipe(duplex=False)
        self._closing = False
        self._cancelled = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.busy_s = 0.0
        """Seconds in which at least one worker was busy."""

    def submit(self, request: RewardRequest) -> None:
        """Add one response and return at once.

        Raises what ``results`` would, as soon as an earlier response failed.
        """
        if self._error is not None:
            raise self._error
        score = self._score_at_once(request)
        self._scores.append(score)
        if score is not None:
            return
        if self._thread is None:
            self._start_workers()
            self._thread = threading.Thread(target=self._run, name="scoring", daemon=True)
            self._thread.start()
        self._queue.append((len(self._scores) - 1, request))
        self._wake_up()

    def results(self) -> list[Score]:
        """Wait for all scores and return them in the order of ``submit``.

        Raises UserError, naming the prompt, when a user's function fails, and StopRequested at
        once, however long a function takes: ``cancel`` the round then.
        """
        self._closing = True
        self._wake_up()
        while self._thread is not None and self._thread.is_alive():
            signals.check()
            self._thread.join(signals.POLL_S)
        self._end()
        if self._error is not None:
            self._workers.close()
            raise self._error
        return [score for score in self._scores if score is not None]

    def cancel(self) -> None:
        """Drop all responses. The workers end, so that no score of theirs gets into the next
        round.
        """
        self._cancelled = True
        self._end()
        self._workers.close()

    def _end(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._wake_up()
            self._thread.join()
        self._wakeup_reader.close()
        self._wakeup_writer.close()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # the thread ended by an error, which ``results`` raises
            self._wakeup_writer.send_bytes(b"!")

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as e:
            self._error = e

    def _serve(self) -> None:
        """The thread: give requests to idle workers and take their scores."""
        idle = self._workers.idle()
        jobs: list[_Job] = []
        while not self._cancelled and (self._queue or jobs or not self._closing):
            while self._queue and idle:
                jobs.append(self._start_job(idle.pop()))
            started = time.monotonic()
            self._wait(jobs)
            if jobs:
                self.busy_s += time.monotonic() - started
            unfinished: list[_Job] = []
            for job in jobs:
                if any(_is_ready(connection) for connection in job.worker.waits):
                    idle.append(self._receive(job))
                elif time.monotonic() >= job.deadline:
                    reason = f"took longer than {self._workers.timeout_s:g} s"
                    idle.append(self._fail(job, reason))
                else:
                    unfinished.append(job)
            jobs = unfinished

    def _wait(self, jobs: list[_Job]) -> None:
        """Wait for a score, a new request, the end of the round, or the earliest deadline."""
        timeout_s: float | None = None
        if jobs:
            timeout_s = max(0.0, min(job.deadline for job in jobs) - time.monotonic())
        connections: list[Any] = [c for job in jobs for c in job.worker.waits]
        ready = wait([*connections, self._wakeup_reader], timeout_s)
        if self._wakeup_reader in ready:
            while self._wakeup_reader.poll():
                self._wakeup_reader.recv_bytes()

    def _start_job(self, worker: Worker) -> _Job:
        """Send the next request to ``worker``, or to a new one when it died while it was idle."""
        index, request = self._queue.popleft()
        self._requests[index] = request
        try:
            worker.send(request)
        except WorkerDied:
            worker = self._workers.replace(worker)
            worker.send(request)
        deadline = time.monotonic() + self._workers.timeout_s
        return _Job(worker=worker, index=index, deadline=deadline)

    def _receive(self, job: _Job) -> Worker:
        """Take the score of ``job``; return the worker that is idle now."""
        try:
            self._scores[job.index] = job.worker.receive(0)
            return job.worker
        except WorkerDied as e:
            return self._fail(job, f"ended its process: {e}")

    def _fail(self, job: _Job, reason: str) -> Worker:
        self._scores[job.index] = self._workers.failed_score(self._requests[job.index], reason)
        return self._workers.replace(job.worker)


def _is_ready(connection: Any) -> bool:
    return bool(wait([connection], 0))
