"""Validation with several responses: each number equals the plainest count of its definition."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from trainer.rewards import Score
from trainer.run.reference_scores import FILE, load_reference, save_reference
from trainer.run.source_metrics import (
    PromptResult,
    best_of,
    majority,
    source_metrics,
    win_rate,
)
from trainer.run.validation import VALIDATION_METRICS, answer_of, validation_may_give


def result(index: int, rewards: list[float], answers: str = "", **more: Any) -> PromptResult:
    return PromptResult(
        index=index,
        source=more.pop("source", "gsm8k"),
        digest=more.pop("digest", index),
        values={"reward": rewards, **more},
        answers=list(answers) or [""] * len(rewards),
    )


def test_best_of_is_the_mean_over_all_choices() -> None:
    chance = random.Random(0)
    for n in range(1, 8):
        values = [chance.choice([0.0, 1.0, chance.random()]) for _ in range(n)]
        for k in range(1, n + 1):
            choices = [max(choice) for choice in itertools.combinations(values, k)]
            assert best_of(values, k) == pytest.approx(sum(choices) / len(choices), abs=1e-12)


def test_best_of_zeros_and_ones_is_pass_at_k() -> None:
    """1 - C(n-c, k) / C(n, k), as a product (Chen et al. 2021, figure 3)."""
    for n, c, k in [(10, 3, 4), (8, 0, 2), (8, 8, 3), (5, 1, 5)]:
        product = 1.0
        for i in range(n - c + 1, n + 1):
            product *= 1.0 - k / i
        expected = 1.0 if n - c < k else 1.0 - product
        assert best_of([1.0] * c + [0.0] * (n - c), k) == pytest.approx(expected, abs=1e-12)


def test_the_majority_counts_whole_answers_and_the_first_of_equals() -> None:
    assert majority(["7", "5", "7"], [0.0, 1.0, 0.0]) == 0.0
    assert majority(["5", "7"], [1.0, 0.0]) == 1.0
    assert majority(["7", "5"], [0.0, 1.0]) == 0.0


def test_names_and_values_by_data_source() -> None:
    results = [
        result(0, [1.0, 0.0, 0.0, 0.0], "5777", acc=[1.0, 0.0, 0.0, 0.0]),
        result(1, [1.0, 1.0, 0.0, 1.0], "3343", acc=[1.0, 1.0, 0.0, 1.0]),
        result(2, [0.5, 0.5, 0.5, 0.5], "aaaa", source="openai/math"),
    ]
    metrics = source_metrics(results)
    assert metrics["val-core/gsm8k/reward/mean@4"] == 0.5
    assert metrics["val-core/gsm8k/reward/best@4/mean"] == 1.0
    assert metrics["val-aux/gsm8k/reward/best@2/mean"] == pytest.approx((0.5 + 1.0) / 2)
    assert metrics["val-core/gsm8k/reward/maj@4/mean"] == 0.5  # 7 is wrong, 3 is right
    assert metrics["val-core/gsm8k/acc/mean@4"] == 0.5
    assert metrics["val-core/openai/math/reward/mean@4"] == 0.5
    assert metrics["val-aux/openai/math/reward/std@4"] == 0.0
    assert not any("math/acc" in name for name in metrics)
    assert set(source_metrics([result(0, [1.0], source="")])) == {"val-core/unknown/reward/mean@1"}


def test_the_win_rate_compares_the_same_prompts(tmp_path: Path) -> None:
    save_reference(tmp_path, [result(i, [0.5, 0.5]) for i in range(4)])
    reference = load_reference(tmp_path)
    now = [
        result(0, [1.0, 0.5]),
        result(1, [0.5, 0.5]),
        result(2, [0.0, 0.5]),
        result(3, [1.0, 1.0], digest=99),  # another prompt of that index
    ]
    assert win_rate(now, reference) == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert win_rate(now, {}) is None


@pytest.mark.parametrize(
    "text", ["", "[]", '{"prompts": {"a": [1, 2]}}', '{"prompts": {"1": [1]}}', '{"prompts": 3}']
)
def test_a_damaged_reference_gives_no_win_rate(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert load_reference(tmp_path) == {}
    (tmp_path / FILE).write_text(json.dumps({"prompts": {"1": [2, 0.5]}}))
    assert load_reference(tmp_path) == {1: (2, 0.5)}


def test_a_best_metric_of_validations_is_known_before_the_first_one() -> None:
    name = "val-core/gsm8k/reward/best@4/mean"
    before = set(VALIDATION_METRICS) | {"actor/loss"}
    seen = before | {"val-core/gsm8k/reward/mean@1"}
    assert validation_may_give(name, before) and not validation_may_give(name, seen)
    assert validation_may_give("val/win_rate", seen)
    assert not validation_may_give("val/rewrd", before)
    assert not validation_may_give(name, {"actor/loss"})  # a run without validation


def test_what_a_response_answers() -> None:
    score = Score(value=0.0)
    assert answer_of("so\n#### 1,000", score) == answer_of("so \\boxed{1,000}.", score)
    assert answer_of(" no idea ", score) == "no idea"
    assert answer_of("#### 5", Score(value=0.0, pred="6")) == "6"
