"""Scores many responses in parallel, each within a bounded time."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.base.errors import UserError
from trainer.base.forked import Forked
from trainer.base.user_code import describe_exception
from trainer.config.schema import Config
from trainer.data import worker_count
from trainer.rewards.maths import quick_maths, slow_maths
from trainer.rewards.scoring_round import ScoringRound, Worker
from trainer.rewards.types import RewardFunction, RewardRequest, Score, to_score
from trainer.rewards.user import load_reward

MATHS_TIMEOUT_S = 10.0
USER_TIMEOUT_S = 300.0


class Scorer:
    """Scores responses with the maths rule, or with ``reward`` when one is given.

    Plain numbers after ``####`` are compared in the calling process. Everything else runs in
    ``workers`` forked processes, so that no call can hang or crash the trainer; any thread may call
    the scorer. A call lasts at most ``timeout_s`` seconds (10 for the rule, 300 for a user's
    function). Then its process is killed: the rule scores 0 with ``unjudged`` set, and a user's
    function is an error. A user's function can't use CUDA in these processes, and each process has
    its own copy of what the function keeps in memory.
    """

    def __init__(
        self,
        reward: RewardFunction | None = None,
        *,
        name: str = "maths",
        workers: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        """``name``: of the reward function, for messages."""
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._reward = reward
        self._name = name
        self._size = workers
        default = MATHS_TIMEOUT_S if reward is None else USER_TIMEOUT_S
        self.timeout_s = default if timeout_s is None else timeout_s
        self._workers: list[Worker] = []
        self._forked = 0

    @classmethod
    def from_config(cls, config: Config, *, local_ranks: int) -> Scorer:
        """A scorer with the function of ``custom_reward_function``, or with the maths rule when its
        path is null. ``data.num_workers`` workers, at most this rank's share of the node's cores.

        Raises UserError when the function can't be loaded.
        """
        custom = config.custom_reward_function
        workers = worker_count(config.data.num_workers or 1, local_ranks)
        if custom.path is None:
            return cls(workers=workers)
        reward = load_reward(custom.path, custom.name)
        return cls(reward, name=f"{custom.name} in {custom.path}", workers=workers)

    def begin_round(self) -> ScoringRound:
        """Begin a round of responses that arrive one after another. End it before the next one."""
        return ScoringRound(
            self, score_at_once=self._score_at_once, start_workers=self._start_workers
        )

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """Return one score per request, in their order.

        Raises UserError, naming the prompt, when a user's function raises, returns something that
        is not a finite number, ends its process or takes too long.
        """
        scoring = self.begin_round()
        for request in requests:
            scoring.submit(request)
        return scoring.results()

    def close(self) -> None:
        """End the worker processes; the next call starts new ones."""
        workers = self._workers
        self._workers = []
        for worker in workers:
            worker.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def idle(self) -> list[Worker]:
        """All workers (``WorkerPool``)."""
        return list(self._workers)

    def replace(self, worker: Worker) -> Worker:
        """Fork a new worker in place of one that died or hangs (``WorkerPool``)."""
        worker.close()
        self._workers.remove(worker)
        self._workers.append(self._fork())
        return self._workers[-1]

    def failed_score(self, request: RewardRequest, reason: str) -> Score:
        """Score 0 by the maths rule (``WorkerPool``). Raises UserError for a user's function."""
        if self._reward is not None:
            raise UserError(f"the reward function {self._name} {reason}, {_describe(request)}")
        return Score(value=0.0, unjudged=True)

    def _score_at_once(self, request: RewardRequest) -> Score | None:
        if self._reward is not None:
            return None
        value = quick_maths(request.solution_text, request.ground_truth)
        return None if value is None else Score(value=value)

    def _start_workers(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(self._fork())

    def _fork(self) -> Worker:
        if self._reward is None:
            # Imported once in this process, so that no worker imports it during its first call.
            import math_verify  # noqa: F401
        self._forked += 1
        return Forked(self._serve, f"reward worker {self._forked}")

    def _serve(self, request: RewardRequest) -> Score:
        """In a worker: score one response."""
        if self._reward is None:
            return Score(value=slow_maths(request.solution_text, request.ground_truth))
        return call(self._reward, request, self._name)


def call(reward: RewardFunction, request: RewardRequest, name: str) -> Score:
    """Run a user's function on one response, in this process.

    Raises UserError, naming prompt and source line, when it raises or returns anything but a finite
    number.
    """
    try:
        returned = reward(
            data_source=request.data_source,
            solution_str=request.solution_text,
            ground_truth=request.ground_truth,
            extra_info=request.extra_info,
        )
    except (Exception, SystemExit) as e:
        raise UserError(
            f"the reward function {name} raised {describe_exception(e)}, {_describe(request)}"
        ) from e
    try:
        return to_score(returned)
    except ValueError as e:
        raise UserError(
            f"the reward function {name} returned {e}, {_describe(request)}; return a float"
        ) from e


def _describe(request: RewardRequest) -> str:
    return (
        f"for prompt {request.index} of {request.data_source} "
        f"(answer: {request.solution_text[:80]!r})"
    )
