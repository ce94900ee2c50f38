"""The rule for mathematical answers: plain numbers, and math-verify in a worker process."""

from __future__ import annotations

import itertools
import json
import threading
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rewards.maths_pairs import RIGHT, WRONG
from trainer.rewards import RewardRequest, Score, Scorer, maths
from trainer.rewards.maths import quick_maths
from trainer.rewards.rules.quantities import Quantity, quantity


def request(solution: str, truth: object, index: int = 0) -> RewardRequest:
    return RewardRequest(data_source="d", solution_text=solution, ground_truth=truth, index=index)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_answer_earns_1_however_it_is_written(kind: str) -> None:
    refused = [pair for pair in RIGHT[kind] if maths("d", *pair) != 1.0]
    assert not refused


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_answer_earns_0(kind: str) -> None:
    accepted = [pair for pair in WRONG[kind] if maths("d", *pair) != 0.0]
    assert not accepted


def test_every_truth_is_accepted_as_its_own_answer() -> None:
    pairs = itertools.chain(*RIGHT.values(), *WRONG.values())
    truths = sorted({truth for _, truth in pairs if "boxed" not in truth})
    forms = ("{}", "\\boxed{{{}}}", "#### {}", "The answer is {}.")
    refused = [
        (truth, form)
        for truth in truths
        for form in forms
        if not maths("", form.format(truth), truth)
    ]
    assert not refused


def test_the_labelled_pairs_of_the_shared_data(shared: Path) -> None:
    lines = (shared / "data" / "maths_pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    assert len(pairs) > 40
    misjudged = [
        pair
        for pair in pairs
        if (maths("d", pair["response"], pair["truth"]) == 1.0) != pair["right"]
    ]
    assert not misjudged


def test_numbers_and_words_are_judged_without_a_worker_process() -> None:
    assert quick_maths("the answer is 18", "18") == 1.0
    assert quick_maths("#### 1/3", "0.3333333333333333") == 0.0
    assert quick_maths("#### 18", ["17", 18]) == 1.0
    assert quick_maths("#### Evelyn", "Bob") == 0.0
    assert quick_maths(r"\boxed{\sqrt{4}}", "2") is None


@pytest.mark.parametrize(
    "hostile",
    [
        "\\boxed{" * 20_000,
        "\\boxed{1}" * 20_000,
        "#### 1" * 20_000,
        "#### " + "(" * 3900,
        "#### " + "(" * 1900 + "," + ")" * 1900,
        "#### 1" + " 234" * 900,
        "#### " + "\\text{" * 600,
        "answer" + " " * 30_000,
        "the answer is " * 20_000,
        "answer is\\begin{a}" * 3000,
    ],
)
def test_hostile_texts_are_read_in_bounded_time(hostile: str) -> None:
    """Some of them took 10 to 60 s; the process that reads them is the trainer's own."""
    started = time.process_time()
    for truth in ("5", "word", "(1,2)"):
        quick_maths(hostile, truth)
    assert time.process_time() - started < 3.0


@given(st.fractions())
def test_a_number_is_read_back(value: Fraction) -> None:
    assert quantity(str(value)) == Quantity(value=value)


@given(st.text())
def test_no_text_breaks_the_quick_path(text: str) -> None:
    quantity(text)
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
