"""The built-in agent ``calculator``: evaluates arithmetic expressions without running code."""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from trainer.rollout.agent import Conversation

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
"""A tool call in the form of Hermes and Qwen: JSON with ``name`` and ``arguments``."""
MAX_CHARS = 200
"""Longest expression, characters."""
MAX_EXPONENT = 100
MAX_BASE = 1e6

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """Answers calls such as ``<tool_call>{"name": "calculator", "arguments": {"expression": "2 *
    3"}}</tool_call>`` with the result, or with the reason why they can't be evaluated. A turn
    without a call ends the response.
    """

    async def step(self, conversation: Conversation) -> str | None:
        """Return the results of all calls in the last message, one per line; None without one."""
        calls = CALL.findall(conversation.messages[-1]["content"])
        return "\n".join(map(_answer, calls)) if calls else None


def evaluate(expression: str) -> int | float:
    """Evaluate an arithmetic expression: numbers, + - * / // % ** and brackets.

    Raises ValueError, whose message the model reads, for anything else.
    """
    if len(expression) > MAX_CHARS:
        raise ValueError(f"longer than {MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.replace(",", "").replace("^", "**").strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ValueError("not an arithmetic expression") from e
    try:
        value = _value(tree.body)
    except ZeroDivisionError as e:
        raise ValueError("division by zero") from e
    except (OverflowError, RecursionError) as e:
        raise ValueError("too large") from e
    if isinstance(value, complex) or not math.isfinite(value):
        raise ValueError("not a real number")
    number: int | float = value
    return number


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left = _value(node.left)
        right = _value(node.right)
        if isinstance(node.op, ast.Pow) and (abs(right) > MAX_EXPONENT or abs(left) > MAX_BASE):
            raise ValueError("too large")
        return _BINARY[type(node.op)](left, right)
    raise ValueError("only numbers, + - * / // % ** and brackets are known")


def _answer(call: str) -> str:
    try:
        request = json.loads(call)
        expression = str(request["arguments"]["expression"])
    except (ValueError, KeyError, TypeError):
        return 'error: a call is {"name": "calculator", "arguments": {"expression": "..."}}'
    try:
        value = evaluate(expression)
        return str(value) if isinstance(value, int) else f"{value:.12g}"
    except ValueError as e:
        return f"error: {e}"
