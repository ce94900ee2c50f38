"""A user's reward function: loading, results, and every way in which it can fail."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from trainer.base.errors import UserError
from trainer.rewards import RewardRequest, Score, Scorer, load_reward

FILE = """
import asyncio, math, os, sys, time
import numpy as np

def right(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

def rich(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": np.float32(0.5), "acc": True, "pred": "x", "length": len(solution_str)}

def keywords(**kwargs):
    return sorted(kwargs) == ["data_source", "extra_info", "ground_truth", "solution_str"]

def raises(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "b":
        return {}["nothing"]
    return 0

def returns(data_source, solution_str, ground_truth, extra_info=None):
    return eval(ground_truth)

def pid(data_source, solution_str, ground_truth, extra_info=None):
    return os.getpid()

def _hidden(): ...

def short(a, b): ...

async def later(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return eval(ground_truth)

def forks(data_source, solution_str, ground_truth, extra_info=None):
    child = os.fork()
    return 0.25 if child else 7.0

def long(solution_str, data_source, ground_truth, turns, response_length, finish_reason, **more):
    turns[0]["content"] += "!"
    return {"score": response_length, "same": turns == eval(ground_truth), finish_reason: 1}

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(FILE)
    return path


def requests(*solutions: str, truth: str = "a") -> list[RewardRequest]:
    return [
        RewardRequest(
            data_source="d", solution_text=s, ground_truth=truth, index=10 + i, extra_info={"k": 1}
        )
        for i, s in enumerate(solutions)
    ]


@pytest.mark.parametrize("workers", [1, 2])
def test_scores_come_back_in_order(file: Path, workers: int) -> None:
    with Scorer(load_reward(file, "right"), workers=workers) as scorer:
        assert [s.value for s in scorer.score(requests(*"abacadaa"))] == [1, 0, 1, 0, 1, 0, 1, 1]


def test_a_dict_brings_numbers_for_the_metrics(file: Path) -> None:
    with Scorer(load_reward(file, "rich")) as scorer:
        assert scorer.score(requests("ab")) == [
            Score(value=0.5, extra={"acc": 1.0, "length": 2.0}, pred="x")
        ]


def test_functions_are_called_by_keyword(file: Path) -> None:
    with Scorer(load_reward(file, "keywords")) as scorer:
        assert scorer.score(requests("ab"))[0].value == 1.0


def test_a_function_that_raises_names_prompt_error_and_line(file: Path) -> None:
    with Scorer(load_reward(file, "raises"), name="raises in my_reward.py") as scorer:
        with pytest.raises(
            UserError,
            match=r"^the reward function raises in my_reward.py raised KeyError: 'nothing' "
            r"\(my_reward.py:16\), "
            r"for prompt 11 of d \(answer: 'b'\)$",
        ):
            scorer.score(requests("a", "b", "c"))
        assert [s.value for s in scorer.score(requests("a", "c"))] == [0, 0]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("float('nan')", "returned nan, not a finite number"),
        ("-math.inf", "returned -inf, not a finite number"),
        ("10**400", "returned inf, not a finite number"),
        ("1e200", r"returned 1e\+200, which float32 can't hold"),
        ("None", "returned NoneType 'None', not a number"),
        ("'1.0'", "returned str '1.0', not a number"),
        ("[1.0]", "returned list"),
        ("np.ones(2)", "returned ndarray"),
        ("1j", "returned complex"),
        ("{'acc': 1}", r"returned a dict without 'score' \(it has acc\)"),
        ("{'score': float('nan')}", "returned nan"),
        ("exec('while True: print(1)')", r"raised RuntimeError: more than 100000 characters"),
        ("exec('raise KeyboardInterrupt')", "raised KeyboardInterrupt"),
        ("sys.exit(3)", "raised SystemExit: 3"),
        ("os._exit(3)", r"ended its process: .* exited \(3\)"),
        ("os.kill(os.getpid(), 9)", "ended its process: .*SIGKILL"),
        ("time.sleep(600)", "took longer than 0.5 s"),
    ],
)
def test_what_is_not_a_finite_number_is_the_users_error(
    file: Path, value: str, message: str
) -> None:
    reward = load_reward(file, "returns")
    with (
        Scorer(reward, name="returns", timeout_s=0.5 if "sleep" in value else None) as scorer,
        pytest.raises(
            UserError, match=f"^the reward function returns {message}.*for prompt 10 of d"
        ),
    ):
        scorer.score(requests("x", truth=value))


def test_a_failure_costs_one_response_and_the_others_keep_their_scores(file: Path) -> None:
    """By an exception, a lost process, a time limit and what it returned."""
    truths = ["1.0", "1/0", "os._exit(3)", "0.5", "time.sleep(600)", "None", "2"]
    with Scorer(load_reward(file, "returns"), timeout_s=0.5, on_error=-0.5) as scorer:
        scores = scorer.score([requests("x", truth=truth)[0] for truth in truths])
    assert [s.value for s in scores] == [1.0, -0.5, -0.5, 0.5, -0.5, -0.5, 2.0]
    reasons = ["", "ZeroDivisionError", "exited (3)", "", "took longer", "NoneType", ""]
    for score, reason in zip(scores, reasons, strict=True):
        assert reason in score.failed and bool(reason) == bool(score.failed)


def test_an_async_function_is_awaited(file: Path) -> None:
    with Scorer(load_reward(file, "later"), on_error=9.0) as scorer:
        assert [s.value for s in scorer.score(requests("x", "y", truth="0.5"))] == [0.5, 0.5]
        assert "ZeroDivisionError" in scorer.score(requests("x", truth="1/0"))[0].failed


def test_a_process_that_the_function_forks_does_not_answer(file: Path) -> None:
    with Scorer(load_reward(file, "forks")) as scorer:
        assert [s.value for s in scorer.score(requests(*"abcd"))] == [0.25] * 4


def test_a_function_gets_the_arguments_that_its_signature_names(file: Path) -> None:
    turns = ({"role": "assistant", "content": "1"}, {"role": "tool", "content": "5"})
    seen = [{"role": "assistant", "content": "1!"}, {"role": "tool", "content": "5"}]
    request = RewardRequest(
        data_source="d",
        solution_text="1",
        ground_truth=repr(seen),
        response_length=7,
        finish_reason="length",
        turns=turns,
    )
    with Scorer(load_reward(file, "long")) as scorer:
        assert (
            scorer.score([request, request])
            == [Score(value=7.0, extra={"same": 1.0, "length": 1.0})] * 2
        )


@pytest.mark.parametrize(
    "value", ["1", "True", "np.float32(0.25)", "np.array([0.5])", "np.int64(2)"]
)
def test_numbers_of_every_kind_count(file: Path, value: str) -> None:
    with Scorer(load_reward(file, "returns")) as scorer:
        assert scorer.score(requests("x", truth=value))[0].value > 0


def test_a_worker_lost_between_steps_is_replaced(file: Path) -> None:
    with Scorer(load_reward(file, "pid")) as scorer:
        first = int(scorer.score(requests("x"))[0].value)
        os.kill(first, signal.SIGKILL)
        scorer._workers[0]._process.join(100)
        assert int(scorer.score(requests("x"))[0].value) not in (first, os.getpid())


@pytest.mark.parametrize(
    ("path", "name", "message"),
    [
        (
            "my_rewrd.py",
            "right",
            r"custom_reward_function.path: there is no file .*; did you mean 'my_reward.py'\?",
        ),
        (
            "my_reward.py",
            "rigth",
            r"custom_reward_function.name: .* no function 'rigth'; did you mean 'right'\?",
        ),
        (
            "my_reward.py",
            "zzz",
            r"no function 'zzz'; it has right, rich, keywords, raises, returns, pid, short, "
            r"forks, long$",
        ),
        ("my_reward.py", "constant", r"'constant' in .* is a int, not a function"),
        (
            "my_reward.py",
            "short",
            r"can't be called .*; write def short\(data_source, solution_str, ground_truth",
        ),
        ("syntax.py", "f", r"syntax.py, line 2: "),
        (
            "fails.py",
            "f",
            r"fails.py doesn't load: ModuleNotFoundError: No module named 'nowhere_at_all' "
            r"\(fails.py:1\)",
        ),
        ("notes.txt", "f", r"must end in .py"),
    ],
)
def test_what_cannot_be_loaded_says_which_key_and_why(
    file: Path, path: str, name: str, message: str
) -> None:
    (file.parent / "syntax.py").write_text("x = 1\ndef f(:\n")
    (file.parent / "fails.py").write_text("import nowhere_at_all\n")
    (file.parent / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=message) as caught:
        load_reward(file.parent / path, name)
    assert re.match(r"custom_reward_function\.(path|name): ", str(caught.value))
