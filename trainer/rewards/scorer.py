"""Scores many responses in parallel, each within a bounded time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from trainer.base.errors import UserError
from trainer.base.forked import Forked
from trainer.base.reward_rules import RuleName
from trainer.config.schema import Config
from trainer.data import worker_count
from trainer.rewards.by_source import quick_score, slow_score
from trainer.rewards.guarded_call import call, describe
from trainer.rewards.scoring_round import ScoringRound, Worker
from trainer.rewards.types import RewardFunction, RewardRequest, Score
from trainer.rewards.user import load_reward

MATHS_TIMEOUT_S = 10.0
USER_TIMEOUT_S = 300.0


class Scorer:
    """Scores responses with the rule of their data source, or with ``reward`` when one is given.

    Numbers and words are compared in the calling process. Everything else runs in ``workers``
    forked processes, so that no call can hang or crash the trainer; any thread may call
    the scorer. A call lasts at most ``timeout_s`` seconds (10 for the rule, 300 for a user's
    function). Then its process is killed: the rule scores 0 with ``unjudged`` set. A user's
    function that fails, in this way or another, costs the response ``on_error``. It can't use
    CUDA in these processes, and each process has its own copy of what the function keeps in memory.
    """

    def __init__(
        self,
        reward: RewardFunction | None = None,
        *,
        name: str = "maths",
        rules: Mapping[str, RuleName] | None = None,
        workers: int = 1,
        timeout_s: float | None = None,
        on_error: float | Literal["stop"] = "stop",
    ) -> None:
        """``name``: of the reward function, for messages. ``rules``: ``reward.rules``.
        ``on_error``: the score of a response for which the function gives no finite number;
        ``stop`` raises UserError.
        """
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._reward = reward
        self._name = name
        self._rules = rules or {}
        self._size = workers
        self._on_error = on_error
        default = MATHS_TIMEOUT_S if reward is None else USER_TIMEOUT_S
        self.timeout_s = default if timeout_s is None else timeout_s
        self._workers: list[Worker] = []
        self._forked = 0

    @classmethod
    def from_config(cls, config: Config, *, local_ranks: int) -> Scorer:
        """A scorer with the function of ``custom_reward_function``, or with the rules of the data
        sources when its path is null. ``data.num_workers`` workers, at most this rank's share of
        the node's cores.

        Raises UserError when the function can't be loaded.
        """
        custom = config.custom_reward_function
        workers = worker_count(config.data.num_workers or 1, local_ranks)
        if custom.path is None:
            return cls(rules=config.reward.rules, workers=workers)
        reward = load_reward(custom.path, custom.name)
        name = f"{custom.name} in {custom.path}"
        return cls(reward, name=name, workers=workers, on_error=config.reward.on_error)

    def begin_round(self) -> ScoringRound:
        """Begin a round of responses that arrive one after another. End it before the next one."""
        return ScoringRound(
            self, score_at_once=self._score_at_once, start_workers=self._start_workers
        )

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """Return one score per request, in their order.

        With ``on_error`` stop, raises UserError, naming the prompt, when a user's function raises,
        returns something that is not a finite number, ends its process or takes too long.
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
        """Score 0 by the maths rule, ``on_error`` by a user's function (``WorkerPool``).

        Raises UserError for a user's function whose ``on_error`` is stop.
        """
        if self._reward is None:
            return Score(value=0.0, unjudged=True)
        message = f"the reward function {self._name} {reason}, {describe(request)}"
        return self._failed(UserError(message))

    def _failed(self, error: UserError) -> Score:
        if self._on_error == "stop":
            raise error
        return Score(value=self._on_error, failed=str(error))

    def _score_at_once(self, request: RewardRequest) -> Score | None:
        if self._reward is not None:
            return None
        value = quick_score(request, self._rules)
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
            return Score(value=slow_score(request))
        try:
            return call(self._reward, request, self._name)
        except UserError as error:
            return self._failed(error)
