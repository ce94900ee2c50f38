"""When a checkpoint is saved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.schedule import must_save_by, save_reason


@pytest.mark.parametrize(
    ("step", "options", "reason"),
    [
        (7, {"save_freq": 10}, None),
        (10, {"save_freq": 10}, "steps"),
        (10, {"save_freq": 0}, None),
        (10, {"save_freq": -1}, None),
        (7, {"save_freq": 10, "save_interval_s": 60.0, "seconds_since_last": 59.9}, None),
        (7, {"save_freq": 10, "save_interval_s": 60.0, "seconds_since_last": 60.0}, "interval"),
        (7, {"save_freq": -1, "postponed": True}, "postponed"),
        (7, {"save_freq": -1, "last": True}, "last"),
        (7, {"save_freq": -1, "stop": True, "last": True}, "stop"),
    ],
)
def test_save_reason(step: int, options: dict[str, object], reason: str | None) -> None:
    assert save_reason(step, **({"seconds_since_last": 0.0} | options)) == reason  # type: ignore[arg-type]


@given(times=st.lists(st.floats(0.1, 500), min_size=1, max_size=60), minutes=st.floats(0.5, 20))
def test_no_two_saves_are_further_apart_than_the_interval_and_a_step(
    times: list[float], minutes: float
) -> None:
    since = 0.0
    for step, seconds in enumerate(times, 1):
        since += seconds
        assert since <= minutes * 60 + seconds
        if save_reason(step, save_freq=-1, seconds_since_last=since, save_interval_s=minutes * 60):
            since = 0.0


@given(
    save_s=st.floats(0, 1000),
    step_s=st.floats(0, 1000),
    margin=st.floats(1, 5),
    times=st.lists(st.floats(0.01, 1)),
)
def test_a_save_begun_at_the_first_boundary_past_the_limit_is_in_time(
    save_s: float, step_s: float, margin: float, times: list[float]
) -> None:
    """Whatever the step times up to ``step_s``: the job goes on only while the limit lies ahead."""
    deadline = 1e6
    limit = must_save_by(deadline, save_s=save_s, step_s=step_s, margin=margin)
    latest_boundary = limit + step_s * max(times, default=1.0)
    assert latest_boundary + save_s <= deadline + 1e-6
