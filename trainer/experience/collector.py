"""The rollouts of a step: generated in the step itself, or one step ahead during training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.config.schema import Config
from trainer.data import Example
from trainer.experience.group_filter import GroupFilter
from trainer.experience.prompt_queue import (
    PromptQueue,
    PromptRequest,
    to_resume,
    with_samples,
)
from trainer.experience.sampler import (
    GenerationStopped,
    Rollouts,
    Sampler,
    prompts_per_rank,
)
from trainer.experience.unfinished import share_samples
from trainer.experience.weight_sync import ENDS_THE_RUN, WeightSync, raise_engine_failure
from trainer.ranks.agreement import agreed
from trainer.ranks.world import World
from trainer.rollout import EngineFailed, Sample
from trainer.tracking import Timers

OnFinished = Callable[[Sequence[PromptRequest], int, Sequence[Sample]], None]
"""Called with the requests of a step, the index of one that is finished, and its samples."""


@dataclass(eq=False)
class _Collection:
    """The requests of a step and this rank's rollouts of them."""

    step: int
    requests: list[PromptRequest]
    rollouts: Future[Rollouts]
    already_back: set[int] = field(default_factory=set)
    """Requests, by index, that are in the queue again: begun and not needed."""


class RolloutCollector:
    """Collects the rollouts of each step. All ranks call ``collect`` and ``drain`` together."""

    def __init__(
        self,
        prompts: PromptQueue,
        sampler: Sampler,
        weight_sync: WeightSync,
        world: World,
        *,
        batch_size: int,
        one_step_off: bool = False,
        group_filter: GroupFilter | None = None,
    ) -> None:
        """``batch_size``: prompts of a step, over all ranks. ``one_step_off`` needs an engine in
        processes of its own. ``group_filter``: only such prompts are collected.
        """
        self.prompts = prompts
        self.sampler = sampler
        self.batch_size = batch_size
        self._weight_sync = weight_sync
        self._world = world
        self._one_step_off = one_step_off
        self._ahead: _Collection | None = None
        self._filter = group_filter
        self._rounds: list[_Collection] = []
        """Those of the step under way, until the next one: one, or more with ``group_filter``."""
        self._requests: list[PromptRequest] = []
        """Those of all its rounds."""
        self._pool: ThreadPoolExecutor | None = None
        self._stats: dict[str, float] = {}

    @classmethod
    def from_config(
        cls,
        config: Config,
        batches: Iterator[list[Example]],
        sampler: Sampler,
        weight_sync: WeightSync,
        world: World,
    ) -> RolloutCollector:
        """The collector of ``data.train_batch_size`` prompts a step, taken from ``batches``."""
        return cls(
            PromptQueue.from_config(config, batches),
            sampler,
            weight_sync,
            world,
            batch_size=config.data.train_batch_size,
            one_step_off=config.actor_rollout_ref.rollout.one_step_off,
            group_filter=GroupFilter.from_config(config),
        )

    def collect(
        self,
        step: int,
        version: int,
        timers: Timers,
        *,
        last: bool,
        on_finished: OnFinished | None = None,
    ) -> tuple[list[PromptRequest], Rollouts]:
        """Return the requests of ``step`` and this rank's rollouts of them; with a group filter,
        rollouts of those that it keeps, from as many rounds of generation as it takes.

        ``version``: of the current weights. ``last``: no step follows. ``on_finished`` is called
        for each prompt as soon as it is finished, unless it was generated one step ahead.

        Raises, on all ranks, EngineFailed when one rank's engine is lost, AgreedError when the
        data, a reward function or an agent of one rank fails, and StopRequested soon after one was
        asked to stop. The next call gets the same prompts.
        """
        self._rounds = []
        if self._ahead is None:
            self._generate_now(step, version, timers, on_finished)
        else:
            self._rounds.append(self._ahead)
            self._ahead = None
        rollouts = self._finish_round(timers)
        if self._filter is not None:
            rollouts = self._collect_kept(self._filter, step, version, timers, rollouts)
        self._requests = [request for one in self._rounds for request in one.requests]
        if self._one_step_off and not last:
            self._ahead = self._generate_ahead(step + 1, version, timers)
        return self._requests, rollouts

    def drain(self) -> None:
        """Wait for the rollouts generated ahead and put them back as finished prompts.

        Called before a checkpoint, of whose state they become a part, and before a validation.
        Raises as ``collect`` does.
        """
        if self._ahead is None:
            return
        current = self._ahead
        self._ahead = None
        rollouts = self._agree(current)
        shared = share_samples(_all_samples(rollouts, self.sampler.n), self.sampler.n, self._world)
        self.prompts.put_back(to_resume(current.requests, shared))

    def give_back(self, step: int) -> None:
        """Put back the prompts of ``step``, which is left, and of a step ahead of it. Collective.

        Where ``algorithm.max_staleness`` and an engine of its own allow it, they keep the responses
        and parts of responses that there are. Otherwise they are drawn again, with the same random
        numbers: the run goes on as if it had not been interrupted. (A generation of ``hf`` depends,
        in the last bits, on what else is generated at a time.)
        """
        ahead = self._ahead
        rounds = self._rounds
        self._ahead = None
        self._rounds = []
        for collection in (ahead, *reversed(rounds)):
            if collection is not None and collection.step >= step:
                self._give_back(collection)

    def record_lengths(self, groups: Sequence[int], lengths: Sequence[float]) -> None:
        """Remember the mean response length of the prompts ``groups`` (indices of the requests of
        the last ``collect``), once it is sure that the step is taken.
        """
        self.prompts.record_lengths([self._requests[g].example for g in groups], lengths)

    def stats(self) -> dict[str, float]:
        """Metrics ``rollout/*``: the engine's counters of its last generation."""
        return {f"rollout/{name}": float(value) for name, value in self._stats.items()}

    def close(self) -> None:
        """End the thread that generates ahead. Close the engine first, which ends a generation."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _finish_round(self, timers: Timers) -> Rollouts:
        """Wait for this rank's rollouts of the last round; all ranks have theirs."""
        current = self._rounds[-1]
        with timers("gen"):  # one step off: the wait for the rest of the generation
            rollouts = self._agree(current)
        self._stats = dict(self._weight_sync.rollout_engine.stats())
        self._put_back_unfinished(current, rollouts)
        return rollouts

    def _collect_kept(
        self,
        group_filter: GroupFilter,
        step: int,
        version: int,
        timers: Timers,
        rollouts: Rollouts,
    ) -> Rollouts:
        """This rank's rollouts of the prompts that the filter keeps, those of ``rollouts`` (of the
        first round) first: ``batch_size`` prompts over all ranks, or what the most rounds give.

        What is kept beyond that goes back to the queue. Raises as ``collect`` does, and AgreedError
        when no prompt is kept.
        """
        collected = Rollouts()
        count = 0
        varied = 0
        first_number = 0
        try:
            while True:
                with agreed(self._world):
                    kept = group_filter.kept(rollouts)
                everywhere = sorted(chain.from_iterable(self._world.gather(kept)))
                needed = set(everywhere[: self.batch_size - count])
                collected.extend(rollouts.only(needed, offset=first_number))
                self._put_back_surplus(rollouts, set(kept) - needed)
                count += len(needed)
                varied += len(everywhere)
                first_number += len(self._rounds[-1].requests)
                if count == self.batch_size or len(self._rounds) == group_filter.most_rounds:
                    break
                self._generate_now(step, version, timers, None)
                rollouts = self._finish_round(timers)
            finished = self.batch_size * len(self._rounds)
            with agreed(self._world):
                if count == 0:
                    raise group_filter.nothing_varies(finished, rollouts.scores)
        except ENDS_THE_RUN:
            self.prompts.give_back(step)
            raise
        self._stats["num_gen_batches"] = len(self._rounds)
        self._stats["kept_prompts"] = count
        self._stats["kept_share"] = varied / finished
        return collected

    def _put_back_surplus(self, rollouts: Rollouts, surplus: Collection[int]) -> None:
        """Put prompts of the last round that the step has no room for back as finished ones.
        Collective.
        """
        current = self._rounds[-1]
        samples = _all_samples(rollouts.only(surplus), self.sampler.n)
        shared = share_samples(samples, self.sampler.n, self._world)
        self.prompts.put_back(to_resume(current.requests, shared))
        current.already_back.update(shared)

    def _generate_now(
        self, step: int, version: int, timers: Timers, on_finished: OnFinished | None
    ) -> None:
        """Generate one more round of the step."""
        requests = self._take(step, version, timers)
        result: Future[Rollouts] = Future()
        self._rounds.append(_Collection(step, requests, result))
        try:
            with self._weight_sync.ready(version, timers, keep_awake=self._one_step_off):
                try:
                    rank_requests = self._rank_requests(requests)
                    rollouts = self._roll_out(requests, rank_requests, timers, on_finished)
                    result.set_result(rollouts)
                except (UserError, StopRequested) as error:
                    result.set_exception(error)
        except (EngineFailed, StopRequested) as error:  # raised in ``_agree``, on all ranks
            result.set_exception(error)

    def _generate_ahead(self, step: int, version: int, timers: Timers) -> _Collection:
        requests: list[PromptRequest] = []
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        try:
            requests = self._take(step, version, timers)
            with self._weight_sync.ready(version, timers, keep_awake=True):
                rank_requests = self._rank_requests(requests)
                result = self._pool.submit(self._roll_out, requests, rank_requests, Timers(), None)
        except (*ENDS_THE_RUN, StopRequested) as error:
            # All ranks have the rollouts of the current step: they train on them, and raise the
            # error in the next ``_agree``.
            result = Future()
            result.set_exception(error)
        return _Collection(step, requests, result)

    def _take(self, step: int, version: int, timers: Timers) -> list[PromptRequest]:
        """The requests of a step, the same on all ranks."""
        requests: list[PromptRequest] = []
        earlier = sum(len(one.requests) for one in self._rounds if one.step == step)
        try:
            with timers("data_wait"), agreed(self._world):
                requests = self.prompts.take(self.batch_size, step, version, first_number=earlier)
        except ENDS_THE_RUN:
            self.prompts.put_back(requests)
            raise
        except StopRequested:
            if earlier:
                self.prompts.put_back(requests)  # the rounds before it go back with the step
            else:
                self.prompts.give_back(step)
            raise
        return requests

    def _agree(self, collection: _Collection) -> Rollouts:
        """Wait for this rank's rollouts and return them if no rank failed."""
        error = collection.rollouts.exception()
        if error is not None and not isinstance(error, EngineFailed | UserError | StopRequested):
            raise error
        try:
            raise_engine_failure(self._world, error)
        except ENDS_THE_RUN:
            self.prompts.put_back(collection.requests)
            raise
        except StopRequested:
            if collection not in self._rounds:
                self._give_back(collection)  # the step that it was generated ahead of is trained
            raise
        return collection.rollouts.result()

    def _give_back(self, collection: _Collection) -> None:
        engine_is_separate = not self._weight_sync.rollout_engine.shares_weights
        if not (self.prompts.max_staleness and engine_is_separate):
            self.prompts.give_back(collection.step)
            return
        samples: dict[int, list[Sample]] = {}
        error = collection.rollouts.exception()
        if error is None:
            samples = _all_samples(collection.rollouts.result(), self.sampler.n)
        elif isinstance(error, GenerationStopped):
            samples = error.samples
        shared = share_samples(samples, self.sampler.n, self._world)
        self.prompts.put_back(
            [
                with_samples(request, shared.get(index, ()))
                for index, request in enumerate(collection.requests)
                if index not in collection.already_back
            ]
        )

    def _roll_out(
        self,
        requests: Sequence[PromptRequest],
        rank_requests: Mapping[int, PromptRequest],
        timers: Timers,
        on_finished: OnFinished | None,
    ) -> Rollouts:
        """Generate this rank's share. Ranks exchange nothing here: training's own exchanges may run
        at the same time, in another thread.
        """
        return self.sampler.roll_out(
            rank_requests,
            timers,
            stop_after=prompts_per_rank(self.batch_size, self._world.size)[self._world.rank],
            on_finished=None if on_finished is None else partial(on_finished, requests),
        )

    def _rank_requests(self, requests: Sequence[PromptRequest]) -> Mapping[int, PromptRequest]:
        """This rank's requests by their index, in the order to begin them."""
        indices = range(self._world.rank, len(requests), self._world.size)
        return {i: requests[i] for i in self.prompts.longest_first(indices, requests)}

    def _put_back_unfinished(self, collection: _Collection, rollouts: Rollouts) -> None:
        if len(collection.requests) > self.batch_size:
            shared = share_samples(rollouts.unfinished, self.sampler.n, self._world)
            self.prompts.put_back(to_resume(collection.requests, shared))
            collection.already_back.update(shared)


def _all_samples(rollouts: Rollouts, n: int) -> dict[int, list[Sample]]:
    """Finished and unfinished samples, ``n`` each, by index of their request."""
    samples = dict(rollouts.unfinished)
    for first in range(0, len(rollouts.samples), n):
        index = rollouts.prompt_indices[first]
        samples[index] = rollouts.samples[first : first + n]
    return samples
