"""The generation engine and the trained weights: whole, or handed over, before anything is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from trainer.parallel.engine import Engine
from trainer.parallel.weights import whole_weights
from trainer.parallel.world import World
from trainer.rollout import EngineFailed, RolloutEngine
from trainer.tracking import Timers


class Synced:
    """One rank's generation engine, started when it is first needed. All ranks call ``ready`` together."""

    def __init__(self, rollout: RolloutEngine, engine: Engine, *, check: Callable[[], object] | None = None) -> None:
        """``check``: called once, when weights have been handed over for the first time."""
        self.rollout = rollout
        self._engine, self._check = engine, check
        self._started = False
        self._version: int | None = None

    @contextmanager
    def ready(self, version: int, timers: Timers, *, prefix: str = "", stay: bool = False) -> Iterator[None]:
        """Within: the engine is awake and has the weights at hand, which are ``version``; then memory goes back to
        training unless it is to ``stay``. Timers: ``reshard`` for all of that, ``sync`` for the handing over alone.
        """
        with ExitStack() as whole:
            with timers(prefix + "reshard"):
                if not self._started:
                    self.rollout.start()
                    self._started = True
                self.rollout.wake()
                if self.rollout.shares_weights:
                    whole.enter_context(self._engine.whole_weights())
                    self.rollout.update_weights((), version)
                elif self._version != version:
                    with timers(prefix + "sync"):
                        weights = whole_weights(self._engine.module, sharded=self._engine.settings.zero_stage == 3)
                        self.rollout.update_weights(weights, version)
                    if self._check is not None:
                        self._check()
                        self._check = None
                self._version = version
            yield
        if not stay:
            with timers(prefix + "reshard"):
                self.rollout.sleep()
                self._engine.trim()

    def close(self) -> None:
        """End the engine."""
        self.rollout.close()


def same_on_all(world: World, error: EngineFailed | None) -> None:
    """Raise on every rank when one of them has lost its engine; all ranks call it with what they know."""
    if world.any(error is not None):
        raise error or EngineFailed("the rollout engine of another rank is lost")
