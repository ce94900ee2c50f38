"""What the loop does when a step can't be ended; tests/system loses a real engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.experience.weight_sync import AgreedError
from trainer.rollout import EngineFailed
from trainer.run import loop
from trainer.tracking import Timers


def test_ranks_that_nobody_planned_for_are_refused() -> None:
    config: Any = SimpleNamespace(trainer=SimpleNamespace(nnodes=2, n_gpus_per_node=4))
    loop.require_ranks(config, SimpleNamespace(world_size=8))  # type: ignore[arg-type]
    with pytest.raises(
        UserError,
        match=r"4 rank\(s\) were started, but trainer.nnodes=2 times .*n_gpus_per_node=4 is 8",
    ):
        loop.require_ranks(config, SimpleNamespace(world_size=4))  # type: ignore[arg-type]


class Parts:
    """Context, keeper and show in one: they note what is asked of them."""

    total_steps, step, is_rl, samples_seen = 4, 0, True, 0
    timers = Timers()

    last_logged, error = 0, EngineFailed("gone")

    def __init__(self, lost_in: str, at: int) -> None:
        trainer = SimpleNamespace(val_before_train=False, val_only=False, test_freq=2)
        self.config = SimpleNamespace(trainer=trainer)
        self.engine = SimpleNamespace(keep_private=lambda: None)
        self.loader = SimpleNamespace(start=lambda: None)
        self.tracker = SimpleNamespace(sync=lambda: None, message=lambda text: None)
        self.lost_in, self.at = lost_in, at
        self.logged: list[int] = []
        self.saved: int | None = None

    def may_fail(self, where: str, step: int) -> None:
        if (where, step) == (self.lost_in, self.at):
            raise self.error

    def validation(self, step: int) -> dict[str, float]:
        self.may_fail("validation", step)
        return {"val/reward": 0.5}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append(step)
        self.last_logged = step

    def lost(self, step: int, why: Exception, *, sync: Any) -> Exception:
        self.saved = step
        return type(why)(f"{why}. Step {step} is saved")

    def metrics(self) -> dict[str, float]:
        return {}

    def step_metrics(self, *_: object) -> dict[str, float]:
        return {}

    def stop_requested(self, _: object) -> None:
        return None

    def after_step(self, step: int, *_: object, **__: object) -> None:
        self.may_fail("settling", step)


@pytest.mark.parametrize("step", [0, 3])
def test_a_run_that_only_validates_does_so_at_the_step_it_goes_on_from(step: int) -> None:
    parts: Any = Parts("nowhere", 0)
    parts.step, parts.config.trainer.val_only = step, True
    assert loop.run(parts, parts, parts) == 0
    assert parts.logged == [step]


@pytest.mark.parametrize(
    ("where", "at", "saved", "logged"),
    [
        ("data", 0, None, []),
        ("validation", 0, 0, []),
        ("rollout", 1, 0, [0]),
        ("rollout", 3, 2, [0, 1, 2]),
        ("validation", 2, 2, [0, 1, 2]),
        ("settling", 3, 3, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("error", [EngineFailed("gone"), AgreedError("gone")])
def test_the_last_whole_step_is_saved(
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    at: int,
    saved: int | None,
    logged: list[int],
    error: Exception,
) -> None:
    parts: Any = Parts(where, at)
    parts.error, parts.config.trainer.val_before_train = error, True

    def rl_batch(ctx: Parts, step: int) -> tuple[list[int], dict[str, float]]:
        ctx.may_fail("rollout", step)
        return [1], {}

    monkeypatch.setattr(loop, "endless", lambda loader: loader)
    monkeypatch.setattr(loop, "rl_batch", rl_batch)
    monkeypatch.setattr(loop, "update_policy", lambda ctx, batch, step: ([], {}))
    monkeypatch.setattr(loop, "require_sound_data", lambda ctx, say: ctx.may_fail("data", 0))
    with pytest.raises(
        type(error), match="gone" if saved is None else f"gone. Step {saved} is saved"
    ):
        loop.run(parts, parts, parts)
    assert (parts.saved, parts.logged) == (saved, logged)
