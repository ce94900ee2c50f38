"""Scoring many answers side by side, each within a bounded time."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from trainer.base.errors import UserError
from trainer.base.user_code import raised_where
from trainer.data.forked import Forked
from trainer.rewards.judging import Judging, Worker
from trainer.rewards.maths import quick_maths, slow_maths
from trainer.rewards.types import Reward, RewardRequest, Score, to_score

MATHS_TIMEOUT_S = 10.0
USER_TIMEOUT_S = 300.0


class Scorer:
    """Judges answers with the maths rule, or with ``reward`` when one is given.

    Plain numbers after ``####`` are compared on the spot. Everything else runs in ``workers``
    forked processes, so no call can hang or crash the trainer; it works in any thread. A call lasts
    at most ``timeout_s`` seconds (10 for the rule, 300 for a user's function): after that its
    process is killed, and the rule scores 0 with ``unjudged`` set, while a user's function is an
    error. A user's function can't use CUDA there, and what it keeps in memory is its process's own.
    """

    def __init__(
        self,
        reward: Reward | None = None,
        *,
        name: str = "maths",
        workers: int = 1,
        timeout_s: float | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self._reward, self._name, self._size = reward, name, workers
        default = MATHS_TIMEOUT_S if reward is None else USER_TIMEOUT_S
        self.timeout_s = default if timeout_s is None else timeout_s
        self._workers: list[Worker] = []
        self._forked = 0

    def judging(self) -> Judging:
        """A round of answers that come one after another; end it before the next one begins."""
        return Judging(self, quickly=self._quickly, begin=self._fork_all)

    def score(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score per request, in their order.

        Raises UserError, naming the prompt, when a user's function raises, returns something that
        is not a finite number, ends its process or takes too long.
        """
        judging = self.judging()
        for request in requests:
            judging.submit(request)
        return judging.results()

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _quickly(self, request: RewardRequest) -> Score | None:
        if self._reward is not None:
            return None
        value = quick_maths(request.solution_text, request.ground_truth)
        return None if value is None else Score(value=value)

    def _fork_all(self) -> None:
        while len(self._workers) < self._size:
            self._workers.append(self._fork())

    def idle(self) -> list[Worker]:
        """See :class:`trainer.rewards.judging.Workers`."""
        return list(self._workers)

    def replace(self, worker: Worker) -> Worker:
        """See :class:`trainer.rewards.judging.Workers`."""
        worker.close()
        self._workers.remove(worker)
        self._workers.append(self._fork())
        return self._workers[-1]

    def unjudged(self, request: RewardRequest, why: str) -> Score:
        """See :class:`trainer.rewards.judging.Workers`."""
        if self._reward is not None:
            raise UserError(f"the reward function {self._name} {why}, {_where(request)}")
        return Score(value=0.0, unjudged=True)

    def _fork(self) -> Worker:
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
            f"the reward function {name} raised {raised_where(e)}, {_where(request)}"
        ) from e
    try:
        return to_score(returned)
    except ValueError as e:
        raise UserError(
            f"the reward function {name} returned {e}, {_where(request)}; return a float"
        ) from e


def _where(request: RewardRequest) -> str:
    return f"for prompt {request.index} of {request.data_source} (answer: {request.solution_text[:80]!r})"
