"""When a checkpoint is due, and which ones stay."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.base.errors import UserError
from trainer.checkpoint.store.retention import due, kept, must_save_by, predicted_save_s
from trainer.run.best_metric import Best

STEPS = st.lists(st.integers(1, 200), unique=True, min_size=1, max_size=20)
VALUES = st.none() | st.floats(-5, 5) | st.just(math.nan)


@pytest.mark.parametrize(
    ("step", "options", "why"),
    [
        (7, {"save_freq": 10}, None),
        (10, {"save_freq": 10}, "steps"),
        (10, {"save_freq": 0}, None),
        (10, {"save_freq": -1}, None),
        (7, {"save_freq": 10, "save_interval_s": 60.0, "seconds_since_last": 59.9}, None),
        (7, {"save_freq": 10, "save_interval_s": 60.0, "seconds_since_last": 60.0}, "interval"),
        (7, {"save_freq": -1, "put_off": True}, "put off"),
        (7, {"save_freq": -1, "last": True}, "last"),
        (7, {"save_freq": -1, "stop": True, "last": True}, "stop"),
    ],
)
def test_due(step: int, options: dict[str, object], why: str | None) -> None:
    assert due(step, **({"seconds_since_last": 0.0} | options)) == why  # type: ignore[arg-type]


@given(times=st.lists(st.floats(0.1, 500), min_size=1, max_size=60), minutes=st.floats(0.5, 20))
def test_no_two_saves_are_further_apart_than_the_interval_and_a_step(
    times: list[float], minutes: float
) -> None:
    since = 0.0
    for step, seconds in enumerate(times, 1):
        since += seconds
        assert since <= minutes * 60 + seconds
        if due(step, save_freq=-1, seconds_since_last=since, save_interval_s=minutes * 60):
            since = 0.0


@given(
    save_s=st.floats(0, 1000),
    step_s=st.floats(0, 1000),
    margin=st.floats(1, 5),
    times=st.lists(st.floats(0.01, 1)),
)
def test_a_save_begun_at_the_first_boundary_past_the_mark_is_in_time(
    save_s: float, step_s: float, margin: float, times: list[float]
) -> None:
    """Whatever the step times up to ``step_s``: the job goes on only while the mark lies ahead."""
    deadline = 1e6
    mark = must_save_by(deadline, save_s=save_s, step_s=step_s, margin=margin)
    latest_boundary = mark + step_s * max(times, default=1.0)
    assert latest_boundary + save_s <= deadline + 1e-6


def test_predicted_save_time() -> None:
    assert predicted_save_s(5 * 10**9, bytes_per_s=1e9, commit_s=2.0) == 7.0
    assert predicted_save_s(10**9, bytes_per_s=1e9) > predicted_save_s(10**8, bytes_per_s=1e9)


@given(
    steps=STEPS,
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 50),
    keep_best=st.integers(0, 4),
    best=st.sampled_from(["max", "min"]),
    data=st.data(),
)
def test_what_stays(
    steps: list[int],
    keep_last: int,
    keep_every: int | None,
    keep_best: int,
    best: Literal["max", "min"],
    data: st.DataObject,
) -> None:
    metrics = {s: data.draw(VALUES) for s in steps}
    stay = kept(
        steps,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        metrics=metrics,
        best=best,
    )
    assert stay <= set(steps) and max(steps) in stay
    assert set(sorted(steps)[-keep_last:]) <= stay
    assert not keep_every or {s for s in steps if s % keep_every == 0} <= stay
    known = {s: m for s, m in metrics.items() if m is not None and not math.isnan(m)}
    bests = stay & set(known)
    assert len(bests) >= min(keep_best, len(known))
    if keep_best and known:
        top = (max if best == "max" else min)(known.values())
        assert any(known[s] == top for s in bests)
        # Nothing that went was better than the worst of the best that stayed.
        ranked = sorted(known, key=lambda s: (-known[s] if best == "max" else known[s], s))
        assert set(ranked[:keep_best]) <= stay
    allowed = keep_last + keep_best + (sum(s % keep_every == 0 for s in steps) if keep_every else 0)
    assert len(stay) <= allowed
    assert (
        kept(
            sorted(stay),
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            metrics=metrics,
            best=best,
        )
        == stay
    )


def test_what_is_in_use_stays() -> None:
    assert kept([1, 2, 3], keep_last=1, in_use=[1, 9]) == {1, 3}


def test_retention_after_every_save_ends_with_the_best_of_all() -> None:
    """Step by step, as the committer calls it: the best is never dropped on the way."""
    values = [3.0, 1.0, math.nan, 5.0, 2.0, 5.0, 4.0, 0.0]
    have: set[int] = set()
    for step in range(1, len(values) + 1):
        have = kept(
            sorted(have | {step}),
            keep_last=1,
            keep_best=2,
            metrics=dict(enumerate(values, 1)),
            best="max",
        )
    assert have == {4, 6, 8}


def test_best_goes_on_and_begins_anew_for_another_metric() -> None:
    best = Best("val/reward")
    for step, value in enumerate([0.1, 0.7, math.nan, 0.7, 0.2], 1):
        best.observe(step, {"val/reward": value})
    best.observe(6, {"train/nll": 9.0})
    assert (best.value, best.step) == (0.7, 2)
    again, other = Best("val/reward"), Best("train/nll", "min")
    again.load_state_dict(best.state_dict())
    other.load_state_dict(best.state_dict())
    assert again == best and other.value is None
    other.observe(1, {"train/nll": 2.0})
    other.observe(2, {"train/nll": 1.0})
    assert (other.value, other.step) == (1.0, 2)


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    known = {"val/reward", "train/nll", "timing/step"}
    Best("val/reward").require_known(known)
    Best(None).require_known(set())
    with pytest.raises(
        UserError,
        match=r"val/rewrd is no metric.*did you mean 'val/reward'.*It has train/nll, val/r",
    ):
        Best("val/rewrd").require_known(known)
