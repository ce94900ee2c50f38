"""The rollout engine and the trained weights: handed over, or gathered, before it generates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.config.schema import Rollout
from trainer.models import LoadedModel
from trainer.parallel.engine import Engine
from trainer.parallel.weights import whole_weights
from trainer.ranks.agreement import AgreedError, raise_on_all
from trainer.ranks.world import World
from trainer.rollout import EngineFailed, RolloutEngine, make_engine
from trainer.rollout.log_prob_check import check_log_probs
from trainer.tracking import Timers

ENDS_THE_RUN = (EngineFailed, AgreedError)
"""Errors that end a step and the run; raised on all ranks alike."""


class WeightSync:
    """One rank's rollout engine, started when it is first needed, and the weights that it has. All
    ranks call ``ready`` together.
    """

    def __init__(
        self,
        rollout_engine: RolloutEngine,
        engine: Engine,
        *,
        check: Callable[[], object] | None = None,
    ) -> None:
        """``check`` is called once, after the first hand-over of weights."""
        self.rollout_engine = rollout_engine
        self._engine = engine
        self._check = check
        self._started = False
        self._version: int | None = None

    @classmethod
    def from_config(
        cls, rollout: Rollout, loaded: LoadedModel, engine: Engine, world: World, run_dir: Path
    ) -> WeightSync:
        """The engine ``rollout.name``, not started yet. After the first hand-over of weights its
        log-probs are compared with those of ``engine``.

        Raises UserError for settings that the engine or the model can't work with.
        """
        rollout_engine = make_engine(rollout, loaded, engine.module, world, run_dir)
        dtype = next(engine.module.parameters()).dtype

        def check() -> None:
            with engine.whole_weights() as module:
                check_log_probs(
                    rollout_engine,
                    module,
                    vocabulary=loaded.shape.vocab,
                    dtype=dtype,
                    temperature=rollout.temperature,
                )

        return cls(rollout_engine, engine, check=check)

    @contextmanager
    def ready(
        self, version: int, timers: Timers, *, prefix: str = "", keep_awake: bool = False
    ) -> Iterator[None]:
        """Within the context the rollout engine is awake and has the current weights, ``version``.
        Afterwards its memory goes back to training unless ``keep_awake``.

        Timers, behind ``prefix``: ``reshard`` for everything, ``sync`` for the hand-over alone.
        Raises EngineFailed when the engine is lost, UserError when it refuses the model.
        """
        with ExitStack() as gathered:
            with timers(prefix + "reshard"):
                if self.rollout_engine.shares_weights:
                    self._wake()
                    gathered.enter_context(self._engine.whole_weights())
                    self.rollout_engine.update_weights((), version)
                elif self._version != version:
                    self._hand_over(version, timers, prefix)
                    self._check_once()
                else:
                    self._wake()
                self._version = version
            yield
        if not keep_awake:
            with timers(prefix + "reshard"):
                self.rollout_engine.sleep()
                self._engine.trim_memory()

    def weights_replaced(self) -> None:
        """The weights of the current version are others now: hand them over again."""
        self._version = None

    def close(self) -> None:
        """End the rollout engine."""
        self.rollout_engine.close()

    def _wake(self) -> None:
        if not self._started:
            self.rollout_engine.start()
            self._started = True
        self.rollout_engine.wake()

    def _check_once(self) -> None:
        if self._check is not None:
            self._check()
            self._check = None

    def _hand_over(self, version: int, timers: Timers, prefix: str) -> None:
        """Send the weights to the rollout engine.

        All ranks gather sharded weights together. A rank whose engine is lost therefore gathers
        them to the end, and all ranks raise before they gather again. So does one that is asked to
        stop while it waits for the engine.
        """
        sharded = self._engine.settings.zero_stage == 3
        error: EngineFailed | StopRequested | None = None
        weights = whole_weights(self._engine.module, sharded=sharded)
        try:
            self._wake()
            with timers(prefix + "sync"):
                self.rollout_engine.update_weights(weights, version)
        except (EngineFailed, StopRequested) as failure:
            error = failure
        if sharded:
            deque(weights, maxlen=0)
            raise_engine_failure(self._engine.world, error)
        elif error is not None:
            raise error


def raise_engine_failure(
    world: World, error: EngineFailed | UserError | StopRequested | None
) -> None:
    """Raise on every rank when one of them lost its rollout engine, met wrong input, or was asked
    to stop. Collective.

    Raises AgreedError for wrong input, which comes first, StopRequested, and EngineFailed for a
    lost engine.
    """
    elsewhere = EngineFailed("the rollout engine of another rank is lost")
    raise_on_all(world, error, elsewhere=elsewhere)
