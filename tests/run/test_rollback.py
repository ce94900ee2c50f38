"""When a run rolls back, what that changes and what goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.run.ranks import Rank
from tests.run.test_checkpoints import Clock, clock, make_checkpoints  # noqa: F401
from trainer.base.errors import UserError
from trainer.config.schema.trainer import Rollback
from trainer.experience.prompt_queue import PromptRequest
from trainer.run.best_metric import BestMetric
from trainer.run.rollback import RollbackRule, roll_back

REWARD = "val/reward"


def make_rule(**changed: Any) -> RollbackRule:
    values = {"enable": True, "patience": 2, "min_delta": 0.1, "max_rollbacks": 2} | changed
    return RollbackRule(Rollback(**values), BestMetric(REWARD))


def see(rule: RollbackRule, *values: float | None, first: int = 1) -> list[bool]:
    """Whether a rollback is due after each value; None: a step without a validation."""
    due = []
    for step, value in enumerate(values, first):
        metrics = {} if value is None else {REWARD: value}
        rule.best.observe(step, metrics)
        rule.observe(step, metrics)
        due.append(rule.is_due)
    return due


def test_falls_in_a_row_make_it_due_and_a_recovery_begins_anew() -> None:
    assert see(make_rule(), 0.5, 0.45, 0.3, None, 0.2) == [False, False, False, False, True]
    assert see(make_rule(), 0.5, 0.3, 0.45, 0.3) == [False] * 4
    assert see(make_rule(), 0.5, float("nan"), float("nan")) == [False, False, True]
    assert see(make_rule(enable=False), 0.5, 0.0, 0.0) == [False] * 3


def test_a_resumed_run_counts_the_same_values_once() -> None:
    rule = make_rule()
    see(rule, 0.5, 0.1)
    resumed = make_rule()
    resumed.best.load_state_dict(rule.best.state_dict())
    resumed.load_state_dict(rule.state_dict())
    assert see(resumed, 0.1, first=2) == [False]
    assert see(resumed, 0.1, first=3) == [True]


def test_weights_go_back_and_counters_go_on(tmp_path: Path) -> None:
    ctx: Any = Rank(tmp_path)
    ctx.train()
    steps = []
    ctx.weight_sync = SimpleNamespace(weights_replaced=lambda: steps.append("handed over again"))
    saved_kl = ctx.kl_controller.state_dict()
    ctx.kl_controller.update(5.0, 1000)
    position = ctx.loader.state_dict()
    restored = SimpleNamespace(
        step=1, manifest=SimpleNamespace(metric=0.5), global_state={"kl": saved_kl}
    )
    checkpointer: Any = SimpleNamespace(restore_best=lambda: restored)
    rule = make_rule()
    see(rule, 0.5, 0.1, 0.1)
    text = roll_back(ctx, checkpointer, rule, 3)
    assert "Rolled back at step 3 to the weights and optimizer of step 1 (val/reward 0.5)" in text
    assert "Rollback 1 of 2" in text and "the next step is 4" in text
    assert ctx.kl_controller.state_dict() == saved_kl
    assert steps == ["handed over again"]
    assert ctx.loader.state_dict() == position and ctx.samples_seen == 4
    (waiting,) = ctx.collector.prompts.take(1, 4, 3)
    assert waiting == PromptRequest(example=ctx.train_data[5], step=4, number=0)
    assert not rule.is_due and rule.count == 1
    checkpointer.restore_best = lambda: None
    see(rule, 0.1, 0.1, first=4)
    assert "no checkpoint with it is left" in roll_back(ctx, checkpointer, rule, 5)
    assert rule.count == 1 and not rule.is_due


def test_the_run_ends_when_it_falls_after_the_last_rollback(tmp_path: Path, clock: Clock) -> None:  # noqa: F811
    options = {"enable": True, "patience": 1, "min_delta": 0.1, "max_rollbacks": 0}
    checkpoints, checkpointer = make_checkpoints(tmp_path, rollback=options, test_freq=1)
    for step, value in ((1, 0.5), (2, 0.1)):
        if step == 2:
            with pytest.raises(UserError, match=r"val/reward fell again: 1 values.*step_1 trainer"):
                checkpoints.roll_back(step, {REWARD: value}, last=False)
            assert checkpoints.roll_back(step, {REWARD: value}, last=True) is None
        checkpoints.after_step(step, {REWARD: value}, last=False, stop=None, sync=lambda: None)
    assert checkpointer.steps == [1], "the best step is saved, whatever the interval"


def test_without_a_validation_it_is_refused(tmp_path: Path, clock: Clock) -> None:  # noqa: F811
    with pytest.raises(UserError, match="compares validations, and this run has none"):
        make_checkpoints(tmp_path, rollback={"enable": True}, test_freq=1, validates=False)
