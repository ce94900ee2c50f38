"""Responses are scored while others are generated, each within its time, even if a worker dies."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trainer.base import signals
from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.rewards import RewardRequest, Scorer

GATE = "gate"


def request(text: str, index: int = 0) -> RewardRequest:
    return RewardRequest(
        data_source="toy", solution_text=text, ground_truth="1", extra_info={}, index=index
    )


def waits_for_file(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    """Waits until a path exists; returns a number as it is."""
    if not solution_str.startswith("/"):
        return float(solution_str)
    deadline = time.monotonic() + 200
    while not Path(solution_str).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(solution_str)
        time.sleep(0.005)
    return 1.0


def test_responses_are_scored_before_all_have_arrived(tmp_path: Path) -> None:
    called = tmp_path / "called"

    def touches(
        data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> float:
        called.touch()
        return 1.0

    with Scorer(touches, workers=1) as scorer:
        scoring = scorer.begin_round()
        scoring.submit(request("first"))
        deadline = time.monotonic() + 200
        while not called.exists():  # before the results are requested
            assert time.monotonic() < deadline
            time.sleep(0.005)
        scoring.submit(request("second"))
        assert [s.value for s in scoring.results()] == [1.0, 1.0]
        assert scoring.busy_s > 0


def test_scores_are_in_the_order_of_the_responses_not_of_finishing(tmp_path: Path) -> None:
    gate = tmp_path / GATE
    with Scorer(waits_for_file, workers=2) as scorer:
        scoring = scorer.begin_round()
        scoring.submit(request(str(gate)))
        for k in range(40):
            scoring.submit(request(str(k)))
        threading.Timer(0.1, gate.touch).start()
        assert [s.value for s in scoring.results()] == [1.0, *map(float, range(40))]


def test_many_rounds_from_a_busy_thread_lose_nothing() -> None:
    with Scorer(waits_for_file, workers=2) as scorer:
        for size in range(50):
            scoring = scorer.begin_round()
            for k in range(size % 7):
                scoring.submit(request(str(k)))
            assert [s.value for s in scoring.results()] == [float(k) for k in range(size % 7)]


def test_a_cancelled_round_ends_at_once_and_the_next_one_starts_clean(
    tmp_path: Path,
) -> None:
    with Scorer(waits_for_file, workers=1) as scorer:
        scoring = scorer.begin_round()
        scoring.submit(request(str(tmp_path / "never")))
        started = time.monotonic()
        scoring.cancel()
        assert time.monotonic() - started < 100
        assert [s.value for s in scorer.score([request("3"), request("4")])] == [3.0, 4.0]


def test_an_error_is_raised_once_and_names_the_prompt() -> None:
    with Scorer(waits_for_file, name="mine", workers=1) as scorer:
        scoring = scorer.begin_round()
        scoring.submit(request("1"))
        scoring.submit(request("x", index=7))
        with pytest.raises(UserError, match=r"mine raised ValueError.*prompt 7"):
            scoring.results()
        assert [s.value for s in scorer.score([request("5")])] == [5.0]


def test_an_error_is_raised_by_the_next_submit() -> None:
    with Scorer(waits_for_file, name="mine", workers=1) as scorer:
        scoring = scorer.begin_round()
        scoring.submit(request("x", index=3))
        deadline = time.monotonic() + 200
        with pytest.raises(UserError, match="prompt 3"):  # not after minutes of generation
            while time.monotonic() < deadline:
                scoring.submit(request("1"))
                time.sleep(0.005)
        scoring.cancel()
        assert [s.value for s in scorer.score([request("5")])] == [5.0]


def test_a_stop_does_not_wait_for_a_function_that_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Scorer(waits_for_file, workers=1) as scorer:
        scoring = scorer.begin_round()
        scoring.submit(request(str(tmp_path / "never")))
        monkeypatch.setattr(signals._request, "cause", "USR2")
        began = time.monotonic()
        with pytest.raises(StopRequested):
            scoring.results()
        scoring.cancel()
        assert time.monotonic() - began < 60  # the function waits for 200 s
        assert scorer.idle() == []
