"""Length penalties."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards import OverlongPenalty, Score, length_penalty


def test_the_length_penalty_falls_over_the_buffer() -> None:
    penalties = [
        length_penalty(n, max_length=100, buffer=20, factor=2.0) for n in (0, 80, 90, 100, 500)
    ]
    assert penalties == [0.0, 0.0, -1.0, -2.0, -2.0]
    with pytest.raises(ValueError, match="buffer must be from 1"):
        length_penalty(1, max_length=10, buffer=11)


@given(st.integers(0, 300), st.integers(1, 100), st.integers(0, 100), st.floats(0, 10))
def test_longer_is_never_better(length: int, buffer: int, more: int, factor: float) -> None:
    a = length_penalty(length, max_length=buffer + more, buffer=buffer, factor=factor)
    b = length_penalty(length + 1, max_length=buffer + more, buffer=buffer, factor=factor)
    assert -factor <= b <= a <= 0


def test_the_penalty_is_added_to_the_score_and_logged() -> None:
    overlong = OverlongPenalty(max_length=20, buffer=4, factor=2.0)
    score = Score(value=1.0, extra={"acc": 1.0}, failed="why")
    assert overlong.applied(score, 17) == Score(
        value=0.5, extra={"acc": 1.0, "overlong_reward": -0.5, "overlong": 1.0}, failed="why"
    )
    assert overlong.applied(score, 16).value == 1.0
    assert overlong.applied(score, 16).extra["overlong"] == 0.0
