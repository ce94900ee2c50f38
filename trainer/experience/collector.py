"""The rollouts of a step: drawn now, or, one step off, while the step before was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from trainer.base.errors import UserError
from trainer.experience.prompts import Ask, Prompts, unfinished
from trainer.experience.sampler import Rollouts, Sampler, shares
from trainer.experience.unfinished import share_samples
from trainer.experience.weight_sync import LOST, Synced, agreed, same_on_all
from trainer.ranks.world import World
from trainer.rollout import EngineFailed, Sample
from trainer.tracking import Timers

Told = Callable[[Sequence[Ask], int, Sequence[Sample]], None]


@dataclass(frozen=True)
class _Drawn:
    """A step's prompts, and this rank's rollouts of them."""

    asks: list[Ask]
    rollouts: Future[Rollouts]


class Rolling:
    """Every rank calls ``collect`` and ``settle`` together."""

    def __init__(
        self,
        prompts: Prompts,
        sampler: Sampler,
        synced: Synced,
        world: World,
        *,
        want: int,
        one_step_off: bool = False,
    ) -> None:
        """``want``: prompts of a step, over all ranks. ``one_step_off`` needs an engine with
        processes of its own.
        """
        self.prompts, self.sampler = prompts, sampler
        self._synced, self._world, self.want = synced, world, want
        self._one_step_off = one_step_off
        self._ahead: _Drawn | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._stats: dict[str, float] = {}

    def collect(
        self, step: int, version: int, timers: Timers, *, last: bool, finished: Told | None = None
    ) -> tuple[list[Ask], Rollouts]:
        """The prompts begun in ``step`` and this rank's rollouts. ``version``: of the weights at
        hand; ``last``: no step follows. ``finished`` hears of each prompt (asks, its place,
        samples) at once, where it is drawn now.

        Raises EngineFailed on all ranks when one rank's engine is lost, AgreedError when data, a
        reward function or an agent of one rank fail; the prompts are then the next call's again.
        """
        if self._ahead is None:
            drawn = self._draw(step, version, timers, finished)
        else:
            drawn, self._ahead = self._ahead, None
        with timers("gen"):  # one step off: what is left of it
            rollouts = self._agree(drawn)
        self._stats = dict(self._synced.rollout.stats())
        self._give_back(drawn.asks, rollouts)
        if self._one_step_off and not last:
            self._ahead = self._begin(step + 1, version, timers)
        return drawn.asks, rollouts

    def settle(self) -> None:
        """Before a checkpoint or a validation: what is drawn ahead is waited for and becomes part
        of the state, as prompts that are finished already.
        """
        if self._ahead is None:
            return
        drawn, self._ahead = self._ahead, None
        rollouts = self._agree(drawn)
        n = self.sampler.n
        parts = {
            place: rollouts.samples[i : i + n]
            for i, place in enumerate(rollouts.prompts)
            if i % n == 0
        }
        self.prompts.give_back(
            unfinished(drawn.asks, share_samples({**parts, **rollouts.unfinished}, n, self._world))
        )

    def stats(self) -> dict[str, float]:
        """``rollout/*``: what the engine says of its last generation."""
        return {f"rollout/{name}": float(value) for name, value in self._stats.items()}

    def close(self) -> None:
        """Forget what is drawn ahead. Close the engine first: then it ends at once."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _draw(self, step: int, version: int, timers: Timers, finished: Told | None) -> _Drawn:
        asks = self._take(step, version, timers)
        result: Future[Rollouts] = Future()
        try:
            with self._synced.ready(version, timers, stay=self._one_step_off):
                try:
                    result.set_result(self._roll(asks, self._share(asks), timers, finished))
                except UserError as error:
                    result.set_exception(error)
        except EngineFailed as error:  # told once all ranks can hear it
            result.set_exception(error)
        return _Drawn(asks, result)

    def _begin(self, step: int, version: int, timers: Timers) -> _Drawn:
        asks: list[Ask] = []
        self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="rollout")
        try:
            asks = self._take(step, version, timers)
            with self._synced.ready(version, timers, stay=True):
                result = self._pool.submit(self._roll, asks, self._share(asks), Timers(), None)
        except LOST as error:  # the step at hand is whole on all ranks: told where they meet next
            result = Future()
            result.set_exception(error)
        return _Drawn(asks, result)

    def _take(self, step: int, version: int, timers: Timers) -> list[Ask]:
        asks: list[Ask] = []
        try:
            with timers("data_wait"), agreed(self._world):
                asks = self.prompts.take(self.want, step, version)
        except LOST:
            self.prompts.give_back(asks)
            raise
        return asks

    def _agree(self, drawn: _Drawn) -> Rollouts:
        """This rank's rollouts, if all ranks have theirs."""
        error = drawn.rollouts.exception()
        if error is not None and not isinstance(error, EngineFailed | UserError):
            raise error
        try:
            same_on_all(self._world, error)
        except LOST:
            self.prompts.give_back(drawn.asks)
            raise
        return drawn.rollouts.result()

    def _share(self, asks: Sequence[Ask]) -> dict[int, Ask]:
        """This rank's prompts by their place, in the order to begin them."""
        mine = range(self._world.rank, len(asks), self._world.size)
        return {place: asks[place] for place in self.prompts.long_first(mine, asks)}

    def _roll(
        self, asks: Sequence[Ask], mine: Mapping[int, Ask], timers: Timers, finished: Told | None
    ) -> Rollouts:
        """This rank's share. No exchange between ranks: it runs beside training's own."""
        want = shares(self.want, self._world.size)[self._world.rank]
        told = (
            (lambda place, samples: finished(asks, place, samples))
            if finished is not None
            else _nobody
        )
        return self.sampler.roll_out(mine, timers, want=want, finished=told)

    def _give_back(self, asks: Sequence[Ask], rollouts: Rollouts) -> None:
        if len(asks) > self.want:
            left = share_samples(rollouts.unfinished, self.sampler.n, self._world)
            self.prompts.give_back(unfinished(asks, left))


def _nobody(place: int, samples: Sequence[Sample]) -> None:
    """Hear, and do nothing."""
