"""The training loop when a part of it fails; tests/system kills a real engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.base import signals
from trainer.base.errors import EXIT_OK, EXIT_REQUEUE, UserError
from trainer.base.signals import StopRequested
from trainer.ranks.agreement import AgreedError
from trainer.rollout import EngineFailed
from trainer.run import loop


def test_a_number_of_ranks_that_differs_from_the_config_is_refused() -> None:
    config: Any = SimpleNamespace(trainer=SimpleNamespace(nnodes=2, n_gpus_per_node=4))
    loop.require_ranks(config, SimpleNamespace(world_size=8))  # type: ignore[arg-type]
    with pytest.raises(
        UserError,
        match=r"4 rank\(s\) were started, but trainer.nnodes=2 times .*n_gpus_per_node=4 is 8",
    ):
        loop.require_ranks(config, SimpleNamespace(world_size=4))  # type: ignore[arg-type]


class FakeRun:
    """Stands in for ``RunContext``, ``RunCheckpoints`` and ``RunReporter``; records the calls."""

    total_steps = 4
    restored_step = 0
    last_logged = 0
    error: Exception = EngineFailed("gone")

    def __init__(self, fails_in: str, at_step: int) -> None:
        trainer = SimpleNamespace(
            val_before_train=False,
            val_only=False,
            test_freq=2,
            grace_period_s=120.0,
            checkpoint=SimpleNamespace(save_margin=1.5),
            profiler=SimpleNamespace(steps=None),
        )
        self.config = SimpleNamespace(trainer=trainer)
        self.engine = SimpleNamespace(hide_from_forks=lambda: None)
        self.critic = None
        self.loader = SimpleNamespace(start=lambda: None)
        self.fails_in = fails_in
        self.at_step = at_step
        self.logged: list[int] = []
        self.saved: int | None = None
        self.world = SimpleNamespace(is_main=False, device=torch.device("cpu"))
        self.unlogged: dict[str, Any] | None = None
        self.stop_step = 0
        self.save_s = 1.0

    def fail_if_due(self, phase: str, step: int) -> None:
        if (phase, step) == (self.fails_in, self.at_step):
            raise self.error

    def validation(self, step: int) -> dict[str, float]:
        self.fail_if_due("validation", step)
        return {"val/reward": 0.5}

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.logged.append(step)
        self.last_logged = step

    def message(self, text: str) -> None: ...

    def main_message(self, text: str | None) -> None: ...

    def sync(self) -> None: ...

    def save_lost_run(self, step: int, why: Exception, *, sync: Any) -> Exception:
        self.saved = step
        return type(why)(f"{why}. Step {step} is saved")

    def save_stopped(self, step: int, cause: str, metrics: Any, *, sync: Any) -> None:
        self.saved = step
        self.saved_unlogged = self.unlogged

    def report_stop(self, step: int, cause: str) -> None: ...

    def observe(self, step: int, metrics: dict[str, float]) -> None:
        self.observed = (step, metrics)

    def metrics(self) -> dict[str, float]:
        return {}

    def step_metrics(self, *_: object) -> dict[str, float]:
        return {}

    def roll_back(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
        return None

    def report_rollback(self, step: int, text: str | None) -> None: ...

    def stop_requested(self, _: object) -> None:
        return None

    def after_step(self, step: int, *_: object, **__: object) -> None:
        self.fail_if_due("drain", step)


@pytest.mark.parametrize("step", [0, 3])
def test_val_only_validates_at_the_resumed_step(step: int) -> None:
    fake: Any = FakeRun("nowhere", 0)
    fake.restored_step = step
    fake.config.trainer.val_only = True
    assert loop.run(fake, fake, fake) == 0
    assert fake.logged == [step]


@pytest.mark.parametrize(
    ("phase", "at_step", "saved", "logged"),
    [
        ("data", 0, None, []),
        ("validation", 0, 0, []),
        ("rollout", 1, 0, [0]),
        ("rollout", 3, 2, [0, 1, 2]),
        ("validation", 2, 2, [0, 1, 2]),
        ("drain", 3, 3, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("error", [EngineFailed("gone"), AgreedError("gone")])
def test_a_failure_costs_no_complete_step(
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    at_step: int,
    saved: int | None,
    logged: list[int],
    error: Exception,
) -> None:
    fake: Any = FakeRun(phase, at_step)
    fake.error = error
    fake.config.trainer.val_before_train = True

    def training_step(ctx: FakeRun, step: int, sft_batches: Any) -> Any:
        ctx.fail_if_due("rollout", step)
        return SimpleNamespace(metrics={})

    monkeypatch.setattr(loop, "endless", lambda loader: loader)
    monkeypatch.setattr(loop, "training_step", training_step)
    monkeypatch.setattr(loop, "check_data", lambda ctx, report: ctx.fail_if_due("data", 0))
    message = "gone" if saved is None else f"gone. Step {saved} is saved"
    with pytest.raises(type(error), match=message):
        loop.run(fake, fake, fake)
    assert (fake.saved, fake.logged) == (saved, logged)


@pytest.mark.parametrize(
    ("phase", "at_step", "saved", "logged", "unlogged"),
    [
        ("rollout", 3, 2, [1, 2], None),
        ("validation", 2, 2, [1], {"train/nll": 2.0}),
        ("validation", 4, 4, [1, 2, 3], {"train/nll": 4.0}),
        ("drain", 3, 3, [1, 2, 3], None),
    ],
)
def test_a_stop_saves_the_last_trained_step(
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    at_step: int,
    saved: int,
    logged: list[int],
    unlogged: dict[str, float] | None,
) -> None:
    fake: Any = FakeRun(phase, at_step)
    fake.error = StopRequested("USR2")
    train(monkeypatch, fake, expected=EXIT_REQUEUE)
    assert (fake.saved, fake.logged, fake.saved_unlogged) == (saved, logged, unlogged)
    assert fake.stop_step == saved


def test_a_step_whose_validation_was_left_is_validated_and_logged_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake: Any = FakeRun("nowhere", 0)
    fake.restored_step = 2
    fake.unlogged = {"train/nll": 2.0}
    train(monkeypatch, fake, expected=EXIT_OK)
    assert fake.logged == [2, 3, 4] and fake.unlogged is None
    assert fake.observed == (2, {"train/nll": 2.0, "val/reward": 0.5})


def test_a_stop_before_the_first_update_needs_no_other_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake: Any = FakeRun("rollout", 1)
    fake.error = StopRequested("USR2")
    monkeypatch.setattr(signals._request, "end", lambda cause: EXIT_REQUEUE)
    with pytest.raises(StopRequested):
        train(monkeypatch, fake, expected=EXIT_REQUEUE)
    assert fake.saved is None


def train(monkeypatch: pytest.MonkeyPatch, fake: Any, *, expected: int) -> None:
    def training_step(ctx: FakeRun, step: int, sft_batches: Any) -> Any:
        ctx.fail_if_due("rollout", step)
        ctx.stop_step = step
        return SimpleNamespace(metrics={"train/nll": float(step)})

    monkeypatch.setattr(loop, "endless", lambda loader: loader)
    monkeypatch.setattr(loop, "training_step", training_step)
    monkeypatch.setattr(loop, "check_data", lambda ctx, report: None)
    monkeypatch.setattr(loop, "finish", lambda *parts: None)
    assert loop.run(fake, fake, fake) == expected
