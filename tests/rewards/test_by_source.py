"""Rules by data source: which one judges, what each accepts, rules tried on their own truths."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.base.reward_rules import RULES, RuleName, rule_of
from trainer.data import SourceTruth
from trainer.rewards import RewardRequest, Scorer
from trainer.rewards.self_check import check_truths


def score(
    source: str, solution: str, truth: Any, rules: dict[str, RuleName] | None = None
) -> float:
    request = RewardRequest(data_source=source, solution_text=solution, ground_truth=truth)
    with Scorer(rules=rules) as scorer:
        return scorer.score([request])[0].value


def row(source: str, truth: Any, *, named: bool = True) -> SourceTruth:
    return SourceTruth(
        key="data.train_files",
        location="d.jsonl, row 3",
        data_source=source,
        named=named,
        ground_truth=truth,
    )


def test_verls_sources_have_their_rules() -> None:
    """Names of verl's ``default_compute_score``."""
    for source in ("openai/gsm8k", "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval"):
        assert rule_of(source, {}) == "maths"
    for source in ("math_dapo", "aime2024", "numina_cn_k12", "hiyouga/geometry3k"):
        assert rule_of(source, {}) == "maths"
    for source in ("searchR1_nq", "searchR1_2wikimultihopqa"):
        assert rule_of(source, {}) == "search_em"
    assert rule_of("unheard/of", {}) is None


def test_a_setting_wins_a_name_before_a_pattern_a_long_one_before_a_short_one() -> None:
    rules: dict[str, RuleName] = {"*": "exact_match", "aime*": "search_em", "aime24": "maths"}
    assert [rule_of(s, rules) for s in ("aime24", "aime25", "openai/gsm8k")] == [
        "maths",
        "search_em",
        "exact_match",
    ]


@pytest.mark.parametrize(
    ("solution", "truth", "value"),
    [
        ("The answer is (B).", "B", 1.0),
        ("So it must be B", "A", 0.0),
        ("\\boxed{b}", "B", 1.0),
        ("#### C) Paris", "C", 1.0),
        ("Answer: A and C", "C, A", 1.0),
        ("Answer: A", "A, C", 0.0),
        ("the correct option is D.", "(D)", 1.0),
        ("B\nThe answer is C", "B", 0.0),
        ("Answer: Paris", ["B", "Paris"], 1.0),
        ("", "B", 0.0),
    ],
)
def test_multiple_choice(solution: str, truth: Any, value: float) -> None:
    assert score("cais/mmlu", solution, truth) == value


@pytest.mark.parametrize(
    ("solution", "truth", "value"),
    [
        ("New  York", "New York", 1.0),
        ("new york", "New York", 0.0),
        ("<answer>x = 1;\ny = 2</answer>", "x = 1;\ny = 2", 1.0),
        ("The answer is 0.50", "0.5", 0.0),
        ("#### 1,2", ["2,1", "1,2"], 1.0),
        ("The answer is New York.", "New York", 1.0),
    ],
)
def test_exact_match(solution: str, truth: Any, value: float) -> None:
    assert score("own", solution, truth, {"own": "exact_match"}) == value


@pytest.mark.parametrize(
    ("solution", "truth", "value"),
    [
        ("<think>Rome?</think><answer>the  Beatles!</answer>", ["Beatles", "The Fab Four"], 1.0),
        ("<answer>Rome</answer> or <answer>Beatles</answer>", ["Beatles"], 1.0),
        ("<answer>Beatles</answer> or <answer>Rome</answer>", ["Beatles"], 0.0),
        ("<answer>the Beatles band</answer>", ["Beatles"], 0.0),
        ("The answer is Beatles.", "The Beatles", 1.0),
        ("<answer>!!!</answer>", "The", 0.0),
    ],
)
def test_exact_match_with_aliases(solution: str, truth: Any, value: float) -> None:
    assert score("searchR1_nq", solution, truth) == value


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_accepts_its_own_truths(rule: RuleName) -> None:
    truths: dict[str, list[Any]] = {
        "maths": ["18", 0.5, r"\frac{1}{2}", "5 or 6", ["(1,2)", "x"], "Mr. Smith"],
        "multiple_choice": ["B", "(C)", "A, C", "D. none of them"],
        "exact_match": ["Paris", "U.S.A.", "a\nb", "f(x) {"],
        "search_em": [["New York", "NYC"], "The Beatles", "U.S.", 1984],
    }
    assert check_truths([row("own", t) for t in truths[rule]], {"own": rule}) == []


def test_a_rule_that_refuses_its_own_truth_is_an_error_that_names_row_and_rule() -> None:
    rows = [row("own", "4"), row("own", "48/2 = 24 in May\n48 + 24 = 72 clips in all")]
    with pytest.raises(UserError) as error:
        check_truths(rows, {})
    for part in ("d.jsonl, row 3", "the maths rule", "'own'", "reward.rules.own=RULE"):
        assert part in str(error.value)


def test_what_no_rule_judges_is_said() -> None:
    (note,) = check_truths([row("new/set", "4"), row("a_file", "4", named=False)], {})
    assert "new/set" in note and "maths" in note and "a_file" not in note
    (warning,) = check_truths([row("a_file", "4", named=False)], {"a_fil": "maths"})
    assert warning.startswith("[WARNING] reward.rules.a_fil=maths") and "a_file" in warning
    with pytest.raises(UserError, match="programs"):
        check_truths([row("codecontests", "{}")], {})
