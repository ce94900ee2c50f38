"""The rule for mathematical answers: 1 when the answer equals the ground truth, else 0."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:/\d+)?")
_MAX_DIGITS = 200
"""Longer numbers are not taken as answers; parsing them would take quadratic time."""
_MAX_CHARS = 4000
"""math-verify gets this much of the end of a response; its patterns are slow on long texts."""


def final_text(solution: str) -> str | None:
    """The text after the last ``####``, up to the end of its line; None without one."""
    if "####" not in solution:
        return None
    return solution.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()


def number(text: str) -> Fraction | None:
    """The exact value of a ``text`` that is a number, such as ``1,234.50``, ``-3/4``, ``$18``,
    ``18.`` or ``5%``; None for any other text.

    Currency signs around it, and a percent sign or full stop after it, are ignored.
    """
    bare = text.strip().lstrip("$£€ ").rstrip(".% $£€")
    if len(bare) > _MAX_DIGITS or not _NUMBER.fullmatch(bare):
        return None
    numerator, _, denominator = bare.replace(",", "").partition("/")
    if not denominator:
        return Fraction(numerator)
    if int(denominator) == 0:
        return None
    return Fraction(numerator) / int(denominator)


def quick_maths(solution: str, ground_truth: Any) -> float | None:
    """Compare plain numbers after ``####``: 1.0 if they are equal, 0.0 if not; None when the answer
    or the truth is not a plain number.

    An answer with nothing after ``####`` is wrong. Of a list of truths one is enough.
    """
    answer = final_text(solution)
    if answer is None:
        return None
    if not answer:
        return 0.0
    expected = [number(str(truth)) for truth in _truths(ground_truth)]
    actual = number(answer)
    if actual is None:
        return None
    if actual in expected:
        return 1.0
    return None if None in expected else 0.0


def slow_maths(solution: str, ground_truth: Any) -> float:
    """Score with math-verify: 1.0 or 0.0; of a list of truths one is enough. Called in a worker
    process that can be killed, since hostile input may take forever.

    Its own time limits are switched off: they use SIGALRM, which only works in a main thread.
    """
    from math_verify import parse, verify

    # It warns that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    answer = final_text(solution)
    text = solution[-_MAX_CHARS:] if answer is None else answer[:_MAX_CHARS]
    actual = parse(text if answer is None else _in_dollars(text), parsing_timeout=None)
    if not actual:
        return 0.0
    for truth in _truths(ground_truth):
        expected = parse(_in_dollars(str(truth)), parsing_timeout=None)
        if expected and verify(expected, actual, timeout_seconds=None):
            return 1.0
    return 0.0


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Score with the rule in this process, without a time limit; ``Scorer`` has one."""
    quick = quick_maths(solution_str, ground_truth)
    return slow_maths(solution_str, ground_truth) if quick is None else quick


def _truths(ground_truth: Any) -> list[Any]:
    """All right answers: a list is taken as several of them."""
    return list(ground_truth) if isinstance(ground_truth, list | tuple) else [ground_truth]


def _in_dollars(text: str) -> str:
    """``text`` between dollar signs, without which math-verify doesn't recognise LaTeX."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"
