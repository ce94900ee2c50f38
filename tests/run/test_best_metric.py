"""The best value of a metric, by which ``keep_best`` chooses a checkpoint."""

from __future__ import annotations

import math

import pytest

from trainer.base.errors import UserError
from trainer.run.best_metric import BestMetric


def test_the_best_value_is_resumed_unless_the_metric_changed() -> None:
    best = BestMetric("val/reward")
    for step, value in enumerate([0.1, 0.7, math.nan, 0.7, 0.2], 1):
        best.observe(step, {"val/reward": value})
    best.observe(6, {"train/nll": 9.0})
    assert (best.value, best.step) == (0.7, 2)
    resumed = BestMetric("val/reward")
    other = BestMetric("train/nll", "min")
    resumed.load_state_dict(best.state_dict())
    other.load_state_dict(best.state_dict())
    assert resumed == best and other.value is None
    other.observe(1, {"train/nll": 2.0})
    other.observe(2, {"train/nll": 1.0})
    assert (other.value, other.step) == (1.0, 2)


def test_an_unknown_metric_is_refused_with_the_known_ones() -> None:
    known = {"val/reward", "train/nll", "timing/step"}
    BestMetric("val/reward").require_known(known)
    BestMetric(None).require_known(set())
    with pytest.raises(
        UserError,
        match=r"val/rewrd is no metric.*did you mean 'val/reward'.*It has train/nll, val/r",
    ):
        BestMetric("val/rewrd").require_known(known)
