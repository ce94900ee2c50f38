"""Who judges a run's answers, and what is logged of what they say."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.experience.batch import reward_metrics
from trainer.parallel import exchange
from trainer.rewards import Score
from trainer.run.build import can_judge


def settings(mode: str = "sft", path: str | None = None) -> Any:
    return SimpleNamespace(
        trainer=SimpleNamespace(mode=mode),
        data=SimpleNamespace(answer_key="answer"),
        custom_reward_function=SimpleNamespace(path=path),
    )


def test_validation_data_that_nobody_can_judge_is_an_error() -> None:
    silent: Any = [SimpleNamespace(ground_truth=None, place="v.jsonl, row 1")]
    with pytest.raises(
        UserError, match=r"v.jsonl, row 1 has no field 'answer' .*data.val_files=null"
    ):
        can_judge(settings(), silent)
    assert can_judge(settings(path="reward.py"), silent) and can_judge(settings("rl"), silent)
    assert not can_judge(settings(), None)


def test_what_a_reward_says_beside_the_score_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [
        Score(value=1.0, extra={"format": 1.0, "steps": 4.0}),
        Score(value=0.0, extra={"format": 0.0}),
    ]
    world: Any = SimpleNamespace(rank=0, size=1)
    assert reward_metrics(here, world, rule=False) == {"reward/format": 0.5, "reward/steps": 4.0}
    there = json.dumps({"format": [1.0, 2.0], "other": [3.0, 1.0]}).encode()
    monkeypatch.setattr(exchange, "_all_gather_bytes", lambda mine, world: [mine, there])
    assert reward_metrics(here, world, rule=False, prefix="val_") == {
        "val_reward/format": 0.5,
        "val_reward/other": 3.0,
        "val_reward/steps": 4.0,
    }


def test_answers_that_the_rule_gives_up_are_counted() -> None:
    world: Any = SimpleNamespace(rank=0, size=1)
    given = [Score(value=0.0, unjudged=True), Score(value=1.0), Score(value=0.0), Score(value=0.0)]
    assert reward_metrics(given, world, rule=True) == {"reward/unjudged": 0.25}
    assert reward_metrics([], world, rule=True) == {}
