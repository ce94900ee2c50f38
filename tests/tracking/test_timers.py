"""Phases of a step add up, and their window is the last steps."""

from __future__ import annotations

import pytest

from trainer.tracking.timers import Timers


class FakeClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_within_a_step_and_start_anew_after_it() -> None:
    clock = FakeClock()
    timers = Timers(clock=clock)
    for seconds in (1.0, 2.0):
        with timers("gen"):
            clock.now += seconds
    assert timers.seconds("gen") == 3.0
    assert timers.end_step() == {"timing/gen": 3.0, "timing/gen/mean": 3.0, "timing/gen/std": 0.0}
    assert timers.end_step() == {}


def test_mean_and_deviation_are_those_of_the_window() -> None:
    clock = FakeClock()
    timers = Timers(window=2, clock=clock)
    for seconds in (100.0, 1.0, 3.0):
        with timers("gen"):
            clock.now += seconds
        metrics = timers.end_step()
    assert metrics["timing/gen/mean"] == 2.0
    assert metrics["timing/gen/std"] == pytest.approx(2**0.5)


def test_a_phase_that_raises_is_timed_too() -> None:
    clock = FakeClock()
    timers = Timers(clock=clock)
    with pytest.raises(ValueError), timers("reward"):
        clock.now += 1
        raise ValueError
    assert timers.seconds("reward") == 1.0


def test_queued_kernels_count_where_they_were_launched() -> None:
    clock = FakeClock()

    def synchronize() -> None:
        clock.now += 5.0  # the device works off its queue

    timers = Timers(clock=clock, synchronize=synchronize)
    with timers("update_actor"):
        pass
    assert timers.seconds("update_actor") == 5.0
