"""Scoring many answers side by side, each within a bounded time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import TracebackType

from trainer.data.forked import Forked, WorkerDied
from trainer.errors import UserError
from trainer.rewards.maths import quick_maths, slow_maths
from trainer.rewards.types import Reward, RewardRequest, Score, to_score
from trainer.rewards.user import raised_where

MATHS_TIMEOUT_S = 10.0
USER_TIMEOUT_S = 300.0

_Worker = Forked[RewardRequest, Score]


@dataclass(kw_only=True)
class _Busy:
    worker: _Worker
    at: int
    deadline: float


class Scorer:
    """Judges answers with the maths rule, or with ``reward`` when one is given.

    Plain numbers after ``####`` are compared on the spot. Everything else runs in ``workers`` forked processes, so no
    call can hang or crash the trainer; it works in any thread. A call lasts at most ``timeout_s`` seconds (10 for the
    rule, 300 for a user's function): after that its process is killed, and the rule scores 0 with ``unjudged`` set,
    while a user's function is an error. A user's function can't use CUDA there, and what it keeps in memory is its
    process's own.
    """

    def __init__(
        self, reward: Reward | None = None, *, name: str = "maths", workers: int = 1, timeout_s: float | None = None
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._reward, self._name, self._size = reward, name, workers
        default = MATHS_TIMEOUT_S if reward is None else USER_TIMEOUT_S
        self._timeout_s = default if timeout_s is None else timeout_s
        self._workers: list[_Worker] = []
        self._forked = 0

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score per request, in their order.

        Raises UserError, naming the prompt, when a user's function raises, returns something that is not a finite
        number, ends its process or takes too long.
        """
        scores: list[Score | None] = [self._quickly(r) for r in requests]
        waiting = [i for i, s in enumerate(scores) if s is None]
        if waiting:
            try:
                self._score_by_workers(requests, waiting, scores)
            except BaseException:
                self.close()  # answers of other calls are under way; nobody may take them for the next call's
                raise
        return [s for s in scores if s is not None]

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _quickly(self, request: RewardRequest) -> Score | None:
        if self._reward is not None:
            return None
        value = quick_maths(request.solution_text, request.ground_truth)
        return None if value is None else Score(value=value)

    def _score_by_workers(
        self, requests: Sequence[RewardRequest], waiting: list[int], scores: list[Score | None]
    ) -> None:
        while len(self._workers) < min(self._size, len(waiting)):
            self._workers.append(self._fork())
        idle = list(self._workers)
        queue = waiting[::-1]
        busy: list[_Busy] = []
        while queue or busy:
            while queue and idle:
                i = queue.pop()
                worker = self._send(idle.pop(), requests[i])
                busy.append(_Busy(worker=worker, at=i, deadline=time.monotonic() + self._timeout_s))
            until = max(0.0, min(b.deadline for b in busy) - time.monotonic())
            ready = set(map(id, wait([w for b in busy for w in b.worker.waits], until)))
            still: list[_Busy] = []
            for b in busy:
                if any(id(w) in ready for w in b.worker.waits):
                    scores[b.at], worker = self._take(b, requests[b.at])
                elif time.monotonic() >= b.deadline:
                    why = f"took longer than {self._timeout_s:g} s"
                    scores[b.at], worker = self._give_up(b, requests[b.at], why)
                else:
                    still.append(b)
                    continue
                idle.append(worker)
            busy = still

    def _send(self, worker: _Worker, request: RewardRequest) -> _Worker:
        """Hand a request over; to a new process when this one died while it was idle."""
        try:
            worker.send(request)
            return worker
        except WorkerDied:
            fresh = self._replace(worker)
            fresh.send(request)
            return fresh

    def _replace(self, worker: _Worker) -> _Worker:
        worker.close()
        self._workers.remove(worker)
        self._workers.append(self._fork())
        return self._workers[-1]

    def _take(self, b: _Busy, request: RewardRequest) -> tuple[Score, _Worker]:
        try:
            return b.worker.receive(0), b.worker
        except WorkerDied as e:
            return self._give_up(b, request, f"ended its process: {e}")

    def _give_up(self, b: _Busy, request: RewardRequest, why: str) -> tuple[Score, _Worker]:
        if self._reward is not None:
            raise UserError(f"the reward function {self._name} {why}, {_where(request)}")
        return Score(value=0.0, unjudged=True), self._replace(b.worker)

    def _fork(self) -> _Worker:
        if self._reward is None:
            import math_verify  # noqa: F401  (once here, instead of within the time of each process's first call)
        self._forked += 1
        return Forked(self._serve, f"reward worker {self._forked}")

    def _serve(self, request: RewardRequest) -> Score:
        if self._reward is None:
            return Score(value=slow_maths(request.solution_text, request.ground_truth))
        return call(self._reward, request, self._name)


def call(reward: Reward, request: RewardRequest, name: str) -> Score:
    """Run a user's function on one answer, in this process.

    Raises UserError, naming prompt and source line, when it raises or returns anything but a finite number.
    """
    try:
        returned = reward(
            data_source=request.data_source,
            solution_str=request.solution_text,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
        )
    except (Exception, SystemExit) as e:
        raise UserError(f"the reward function {name} raised {raised_where(e)}, {_where(request)}") from e
    try:
        return to_score(returned)
    except ValueError as e:
        raise UserError(f"the reward function {name} returned {e}, {_where(request)}; return a float") from e


def _where(request: RewardRequest) -> str:
    return f"for prompt {request.index} of {request.data_source} (answer: {request.solution_text[:80]!r})"
