"""A run refuses validation data without answers before it loads anything onto a device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.helpers import minimal_settings, put
from trainer.base.errors import UserError
from trainer.config.loading import load
from trainer.run import build
from trainer.run.build import require_judgeable, truncation_notes


def test_rules_are_tried_on_the_data_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_policy(*_: object) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(build, "load_policy", load_policy)
    file = tmp_path / "d.jsonl"
    worked = "48/2 = 24 in May\n48 + 24 = 72 clips in all"
    file.write_text(json.dumps({"prompt": "a", "answer": worked, "data_source": "own/x"}) + "\n")
    tree = minimal_settings()
    put(tree, "data.task", None)
    put(tree, "data.train_files", str(file))
    put(tree, "trainer.test_freq", -1)
    world: Any = SimpleNamespace(
        is_main=True, device="cpu", any=lambda code: code, gather=lambda text: [text]
    )
    with pytest.raises(UserError, match=r"d.jsonl, row 1: the maths rule, .*reward.rules.own/x="):
        build.build(load(tree), tmp_path, world)
    put(tree, "reward.rules", {"own/x": "exact_match"})
    with pytest.raises(AssertionError, match="the model was loaded"):
        build.build(load(tree), tmp_path, world)


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
