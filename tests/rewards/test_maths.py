"""The rule for mathematical answers: plain numbers, and math-verify in a worker process."""

from __future__ import annotations

import threading
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rewards import RewardRequest, Score, Scorer, maths
from trainer.rewards.maths import final_text, number, quick_maths


def request(solution: str, truth: object, index: int = 0) -> RewardRequest:
    return RewardRequest(data_source="d", solution_text=solution, ground_truth=truth, index=index)


@pytest.mark.parametrize(
    ("solution", "truth", "expected"),
    [
        ("9 + 9 = 18\n#### 18", "18", 1.0),
        ("#### 1,234.50", "1234.5", 1.0),
        ("#### $18.", "18", 1.0),
        ("#### -3/4", "-0.75", 1.0),
        ("#### 18\nand some more", 18, 1.0),
        ("#### 17\n#### 18", "18", 1.0),
        ("#### 17", "18", 0.0),
        ("####", "18", 0.0),
        ("#### 0.1000000000000000000001", "0.1", 0.0),  # exact, not to float precision
        ("the answer is 18", "18", None),
        ("#### x", "18", None),
        ("#### 1/0", "18", None),
        ("#### " + "9" * 5000, "18", None),
    ],
)
def test_plain_numbers_after_the_hashes_are_compared_exactly(
    solution: str, truth: object, expected: float
) -> None:
    assert quick_maths(solution, truth) == expected


@given(st.fractions())
def test_a_number_is_read_back(value: Fraction) -> None:
    assert number(str(value)) == value


@given(st.text())
def test_no_text_breaks_the_quick_path(text: str) -> None:
    final_text(text)
    number(text)
    assert quick_maths(text + "####" + text, text) in (None, 0.0, 1.0)


def test_latex_and_prose_are_scored_by_math_verify_in_any_thread() -> None:
    """math-verify's own time limits only work in a main thread; streaming rewards run in others."""
    cases = [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"#### \frac{3}{4}", "3/4", 1.0),
        ("the answer is 7", "7", 1.0),
        ("the answer is 8", "7", 0.0),
        ("#### 18 apples", "18", 1.0),
        ("I don't know", "7", 0.0),
        ("", "7", 0.0),
    ]
    scores: list[Score] = []
    with Scorer(workers=2, timeout_s=200.0) as scorer:
        thread = threading.Thread(
            target=lambda: scores.extend(
                scorer.score([request(s, t, i) for i, (s, t, _) in enumerate(cases)])
            )
        )
        thread.start()
        thread.join(400)
    assert [(s.value, s.unjudged) for s in scores] == [(e, False) for _, _, e in cases]
    assert maths("d", r"\boxed{2}", "2") == 1.0


def test_an_answer_that_takes_forever_scores_0_after_its_time_limit() -> None:
    hostile = request("$9^{9^{9^{9}}}$", "3")
    with Scorer(workers=1, timeout_s=1.0) as scorer:
        first = scorer.score([hostile, request("#### 3", "3")])
        assert [(s.value, s.unjudged) for s in first] == [(0.0, True), (1.0, False)]
        scorer.timeout_s = 200.0
        assert scorer.score([request("it is 3", "3")]) == [
            Score(value=1.0)
        ]  # the process was replaced


def test_no_requests_no_processes() -> None:
    with Scorer() as scorer:
        assert scorer.score([]) == []
        assert scorer.score([request("#### 1", "1")]) == [Score(value=1.0)]
        assert not scorer._workers
