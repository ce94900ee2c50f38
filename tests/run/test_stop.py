"""The longest that a stop takes is held against the grace period, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainer.run.stop import StopTime


def stop_time(grace_s: float) -> StopTime:
    trainer: Any = SimpleNamespace(
        grace_period_s=grace_s, checkpoint=SimpleNamespace(save_margin=1.5)
    )
    return StopTime(trainer)


def step(update_s: float) -> dict[str, float]:
    """A step of hours of rollouts, which a stop leaves."""
    return {"timing/gen": 5000.0, "timing/update_actor": update_s, "timing/adv": 1.0}


def test_an_update_and_a_save_that_fit_give_no_warning() -> None:
    time = stop_time(120)
    assert [time.observe(step(89.0), 20.0) for _ in range(3)] == [None] * 3  # 90 + 1.5 * 20


def test_those_that_do_not_fit_are_named_once_with_what_to_set() -> None:
    time = stop_time(120)
    assert time.observe(step(500.0), 20.0) is None  # the first one compiles
    assert time.observe(step(9.0), 20.0) is None
    warning = time.observe(step(153.0), 20.0)
    assert warning is not None
    assert "may take 184 s" in warning and "up to 154 s so far" in warning
    assert "trainer.grace_period_s=120" in warning
    assert "hydra.launcher.signal_delay_s 184 or more" in warning
    assert time.observe(step(200.0), 20.0) is None


def test_a_step_that_fits_after_a_longer_one_counts_the_longer() -> None:
    time = stop_time(120)
    time.observe(step(1.0), 1.0)
    assert time.observe(step(100.0), 1.0) is None
    assert time.observe(step(1.0), 20.0) is not None
