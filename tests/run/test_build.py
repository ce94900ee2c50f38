"""A run refuses validation data without answers before it loads anything onto a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.run.build import require_judgeable, truncation_notes


def settings(mode: str = "sft", path: str | None = None) -> Any:
    return SimpleNamespace(
        trainer=SimpleNamespace(mode=mode),
        data=SimpleNamespace(answer_key="answer"),
        custom_reward_function=SimpleNamespace(path=path),
    )


def test_validation_data_without_an_answer_to_score_is_an_error() -> None:
    answered = SimpleNamespace(ground_truth="4", location="v.jsonl, row 1")
    without_answer: Any = [answered, SimpleNamespace(ground_truth=None, location="v.jsonl, row 2")]
    with pytest.raises(
        UserError, match=r"v.jsonl, row 2 has no field 'answer' .*data.val_files=null"
    ):
        require_judgeable(settings(), without_answer)
    require_judgeable(settings(path="reward.py"), without_answer)
    require_judgeable(settings("rl"), without_answer)
    require_judgeable(settings(), [])


def test_cut_validation_prompts_are_told() -> None:
    config: Any = SimpleNamespace(data=SimpleNamespace(truncation="right"))
    examples: Any = [SimpleNamespace(cut_prompt=k == 1) for k in range(3)]
    (note,) = truncation_notes(config, examples)
    assert note == "data.truncation=right cuts 1 of 3 validation prompts"
    assert truncation_notes(config, examples[:1]) == []
