"""The rule for mathematical answers: 1 when the answer equals the ground truth, else 0."""

from __future__ import annotations

import logging
import re
from fractions import Fraction
from typing import Any

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d*)?|\.\d+)(?:/\d+)?")
_MAX_DIGITS = 200
"""Longer numbers are no answers; reading them would cost quadratic time."""
_MAX_CHARS = 4000
"""math-verify sees this much of an answer's end; its patterns are slow on long texts."""


def final_text(solution: str) -> str | None:
    """What stands after the last ``####``, up to the end of its line; None without one."""
    if "####" not in solution:
        return None
    return solution.rsplit("####", 1)[1].strip().split("\n", 1)[0].strip()


def number(text: str) -> Fraction | None:
    """The exact number that ``text`` is, in whole: ``1,234.50``, ``-3/4``, ``$18``, ``18.``,
    ``5%``; else None.

    Signs and units of money before it and a percent sign or full stop after it are passed over.
    """
    bare = text.strip().lstrip("$£€ ").rstrip(".% $£€")
    if len(bare) > _MAX_DIGITS or not _NUMBER.fullmatch(bare):
        return None
    top, _, bottom = bare.replace(",", "").partition("/")
    if bottom and int(bottom) == 0:
        return None
    return Fraction(top) / (int(bottom) if bottom else 1)


def quick_maths(solution: str, ground_truth: Any) -> float | None:
    """1.0 or 0.0 when the comparison of plain numbers after ``####`` decides, else None.

    An answer whose ``####`` is followed by nothing is wrong.
    """
    answer = final_text(solution)
    if answer is None:
        return None
    if not answer:
        return 0.0
    wanted, given = number(str(ground_truth)), number(answer)
    if wanted is None or given is None:
        return None
    return float(wanted == given)


def slow_maths(solution: str, ground_truth: Any) -> float:
    """math-verify's judgement. May take for ever on hostile input: only to be called where it can
    be killed.

    Its own time limits are switched off: they use SIGALRM, which works in a main thread alone.
    """
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its time limits are off
    answer = final_text(solution)
    text = solution[-_MAX_CHARS:] if answer is None else answer[:_MAX_CHARS]
    wanted = parse(_wrapped(str(ground_truth)), parsing_timeout=None)
    given = parse(text if answer is None else _wrapped(text), parsing_timeout=None)
    return float(bool(wanted) and bool(given) and verify(wanted, given, timeout_seconds=None))


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """The rule, in this process and without a bound on its time (see
    :class:`trainer.rewards.Scorer`).
    """
    quick = quick_maths(solution_str, ground_truth)
    return slow_maths(solution_str, ground_truth) if quick is None else quick


def _wrapped(text: str) -> str:
    """LaTeX without its dollar signs is only recognised inside them."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"
