"""A run refuses validation data without answers before it loads anything onto a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.run.build import require_judgeable


def settings(mode: str = "sft", path: str | None = None) -> Any:
    return SimpleNamespace(
        trainer=SimpleNamespace(mode=mode),
        data=SimpleNamespace(answer_key="answer"),
        custom_reward_function=SimpleNamespace(path=path),
    )


def test_validation_data_without_an_answer_to_score_is_an_error() -> None:
    without_answer: Any = [SimpleNamespace(ground_truth=None, location="v.jsonl, row 1")]
    with pytest.raises(
        UserError, match=r"v.jsonl, row 1 has no field 'answer' .*data.val_files=null"
    ):
        require_judgeable(settings(), without_answer)
    require_judgeable(settings(path="reward.py"), without_answer)
    require_judgeable(settings("rl"), without_answer)
    require_judgeable(settings(), None)
