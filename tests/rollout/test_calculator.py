"""The agent ``calculator``: values, refusals, and calls in the text of a turn."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.rollout.agent import Conversation
from trainer.rollout.calculator import Calculator, evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (3 + 4)", 14),
        ("1,200 / 4", 300),
        ("-7 // 2", -4),
        ("2^10", 1024),
        ("7 % 4", 3),
        ("0.5 * 3", 1.5),
    ],
)
def test_values(expression: str, value: float) -> None:
    assert evaluate(expression) == value


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("1 / 0", "division by zero"),
        ("__import__('os').system('true')", "only numbers"),
        ("9 ** 9 ** 9", "too large"),
        ("(" * 80 + ")" * 80, "only numbers"),
        ("2 +", "not an arithmetic"),
        ("1" * 300, "longer than"),
        ("(-8) ** 0.5", "not a real"),
        ("1e308 * 10", "not a real"),
        ("True + 1", "only numbers"),
    ],
)
def test_the_reason_is_given_for_what_cannot_be_evaluated(expression: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        evaluate(expression)


@given(st.text(alphabet="0123456789+-*/%^(). e,_ab\x00", max_size=60))
def test_any_text_gives_a_number_or_a_reason(expression: str) -> None:
    try:
        assert isinstance(evaluate(expression), int | float)
    except ValueError as e:
        assert str(e)


def step(text: str) -> str | None:
    return asyncio.run(
        Calculator().step(
            Conversation(prompt="", messages=[{"role": "assistant", "content": text}])
        )
    )


def test_calls() -> None:
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "3 * 4"}}</tool_call>'
    assert step(f"I need {call} first") == "12"
    assert step(call + "\n" + call.replace("3 * 4", "1 / 3")) == "12\n0.333333333333"
    assert step("The answer is #### 12") is None
    assert str(step('<tool_call>{"name": 1}</tool_call>')).startswith("error: a call is")
    assert (
        step(call.replace("3 * 4", "x"))
        == "error: only numbers, + - * / // % ** and brackets are known"
    )
