"""The generation engine and the trained weights: whole, or handed over, before anything is
generated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from trainer.base.errors import UserError
from trainer.parallel.engine import Engine
from trainer.parallel.weights import whole_weights
from trainer.ranks.world import World
from trainer.rollout import EngineFailed, RolloutEngine
from trainer.tracking import Timers


class AgreedError(UserError):
    """Wrong input that a rank met in the middle of a step; raised on all ranks alike, so that they
    may still save.
    """


LOST = (EngineFailed, AgreedError)
"""Why a step can't be ended, where all ranks know it."""


class Synced:
    """One rank's generation engine, started when it is first needed. All ranks call ``ready``
    together.
    """

    def __init__(
        self, rollout: RolloutEngine, engine: Engine, *, check: Callable[[], object] | None = None
    ) -> None:
        """``check``: called once, when weights have been handed over for the first time."""
        self.rollout = rollout
        self._engine, self._check = engine, check
        self._started = False
        self._version: int | None = None

    @contextmanager
    def ready(
        self, version: int, timers: Timers, *, prefix: str = "", stay: bool = False
    ) -> Iterator[None]:
        """Within: the engine is awake and has the weights at hand, which are ``version``; then
        memory goes back to training unless it is to ``stay``. Timers: ``reshard`` for all of that,
        ``sync`` for the handing over alone.
        """
        with ExitStack() as whole:
            with timers(prefix + "reshard"):
                if self.rollout.shares_weights:
                    self._wake()
                    whole.enter_context(self._engine.whole_weights())
                    self.rollout.update_weights((), version)
                elif self._version != version:
                    self._hand_over(version, timers, prefix)
                    if self._check is not None:
                        self._check()
                        self._check = None
                else:
                    self._wake()
                self._version = version
            yield
        if not stay:
            with timers(prefix + "reshard"):
                self.rollout.sleep()
                self._engine.trim()

    def _wake(self) -> None:
        if not self._started:
            self.rollout.start()
            self._started = True
        self.rollout.wake()

    def _hand_over(self, version: int, timers: Timers, prefix: str) -> None:
        """Sharded weights are gathered by all ranks together: one that has lost its engine gathers
        them to the end, and all hear of it before they gather again.
        """
        sharded, lost = self._engine.settings.zero_stage == 3, None
        weights = whole_weights(self._engine.module, sharded=sharded)
        try:
            self._wake()
            with timers(prefix + "sync"):
                self.rollout.update_weights(weights, version)
        except EngineFailed as error:
            lost = error
        if sharded:
            deque(weights, maxlen=0)
            same_on_all(self._engine.world, lost)
        elif lost is not None:
            raise lost

    def close(self) -> None:
        """End the engine."""
        self.rollout.close()


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Raise AgreedError on every rank when one of them meets wrong input within; all ranks come
    here together.
    """
    error: UserError | None = None
    try:
        yield
    except UserError as found:
        error = found
    same_on_all(world, error)


def same_on_all(world: World, error: EngineFailed | UserError | None) -> None:
    """Raise on every rank when one of them has lost its engine, or met wrong input (AgreedError; it
    comes first). All ranks call it with what they know.
    """
    users = isinstance(error, UserError)
    found = world.any(2 if users else int(error is not None))
    if found == 2:
        raise AgreedError(next(filter(None, world.texts(str(error) if users else "")))) from error
    if found:
        raise error or EngineFailed("the rollout engine of another rank is lost")
