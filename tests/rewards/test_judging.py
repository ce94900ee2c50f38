"""Answers that come one after another are judged meanwhile, each within its time, whatever happens
to a process.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.rewards import RewardRequest, Scorer

GATE = "gate"


def request(text: str, index: int = 0) -> RewardRequest:
    return RewardRequest(
        data_source="toy", solution_text=text, ground_truth="1", extra_info={}, index=index
    )


def waits_for_file(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """A path: until it is there. A number: that number."""
    if not solution_str.startswith("/"):
        return float(solution_str)
    deadline = time.monotonic() + 200
    while not Path(solution_str).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(solution_str)
        time.sleep(0.005)
    return 1.0


def test_answers_are_judged_before_all_are_there(tmp_path: Path) -> None:
    done = tmp_path / "seen"

    def sees(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        done.touch()
        return 1.0

    with Scorer(sees, workers=1) as scorer:
        judging = scorer.judging()
        judging.submit(request("first"))
        deadline = time.monotonic() + 200
        while not done.exists():  # nobody has asked for results yet
            assert time.monotonic() < deadline
            time.sleep(0.005)
        judging.submit(request("second"))
        assert [s.value for s in judging.results()] == [1.0, 1.0]
        assert judging.busy_s > 0


def test_scores_come_in_the_order_of_the_answers_not_of_their_ending(tmp_path: Path) -> None:
    gate = tmp_path / GATE
    with Scorer(waits_for_file, workers=2) as scorer:
        judging = scorer.judging()
        judging.submit(request(str(gate)))
        for k in range(40):
            judging.submit(request(str(k)))
        threading.Timer(0.1, gate.touch).start()
        assert [s.value for s in judging.results()] == [1.0, *map(float, range(40))]


def test_many_rounds_from_a_busy_thread_lose_nothing() -> None:
    with Scorer(waits_for_file, workers=2) as scorer:
        for size in range(50):
            judging = scorer.judging()
            for k in range(size % 7):
                judging.submit(request(str(k)))
            assert [s.value for s in judging.results()] == [float(k) for k in range(size % 7)]


def test_a_round_that_is_given_up_ends_at_once_and_the_next_one_starts_clean(
    tmp_path: Path,
) -> None:
    with Scorer(waits_for_file, workers=1) as scorer:
        judging = scorer.judging()
        judging.submit(request(str(tmp_path / "never")))
        began = time.monotonic()
        judging.cancel()
        assert time.monotonic() - began < 100
        assert [s.value for s in scorer.score([request("3"), request("4")])] == [3.0, 4.0]


def test_an_error_among_them_is_raised_once_and_names_the_prompt() -> None:
    with Scorer(waits_for_file, name="mine", workers=1) as scorer:
        judging = scorer.judging()
        judging.submit(request("1"))
        judging.submit(request("x", index=7))
        with pytest.raises(UserError, match=r"mine raised ValueError.*prompt 7"):
            judging.results()
        assert [s.value for s in scorer.score([request("5")])] == [5.0]


def test_an_error_is_told_with_the_next_answer_already() -> None:
    with Scorer(waits_for_file, name="mine", workers=1) as scorer:
        judging = scorer.judging()
        judging.submit(request("x", index=3))
        deadline = time.monotonic() + 200
        with pytest.raises(UserError, match="prompt 3"):  # not after minutes of generation
            while time.monotonic() < deadline:
                judging.submit(request("1"))
                time.sleep(0.005)
        judging.cancel()
        assert [s.value for s in scorer.score([request("5")])] == [5.0]
