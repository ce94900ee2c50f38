"""The rule for mathematical answers: 1 when the answer equals the ground truth, else 0."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from trainer.rewards.rules.equality import Verify, equals
from trainer.rewards.rules.final_answer import MAX_CHARS, FinalAnswer, final_answer, last_box
from trainer.rewards.rules.plain_text import has_words, is_words, plain_text

_ROOT = re.compile(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)")
_NAMES = re.compile(r"(?<![\\a-zA-Z])(?:pi|infinity)(?![a-zA-Z])")


def quick_maths(solution: str, ground_truth: Any) -> float | None:
    """Score numbers, words, choices and lists of them: 1.0 or 0.0; None when math-verify has to
    compare. Of a list of truths one is enough.
    """
    return _score(solution, ground_truth, None)


def slow_maths(solution: str, ground_truth: Any) -> float:
    """Score with math-verify: 1.0 or 0.0; of a list of truths one is enough. Called in a worker
    process that can be killed, since hostile input may take forever.
    """
    # It warns that its time limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return _score(solution, ground_truth, _verify) or 0.0


def maths(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Score with the rule in this process, without a time limit; ``Scorer`` has one."""
    quick = quick_maths(solution_str, ground_truth)
    return slow_maths(solution_str, ground_truth) if quick is None else quick


def _score(solution: str, ground_truth: Any, verify: Verify | None) -> float | None:
    unknown = False
    for truth in _truths(ground_truth):
        verdict = _answers(solution, truth, verify)
        if verdict:
            return 1.0
        unknown = unknown or verdict is None
    return None if unknown else 0.0


def _truths(ground_truth: Any) -> Iterator[str]:
    """All right answers: a list is taken as several of them."""
    several = isinstance(ground_truth, list | tuple)
    for truth in ground_truth if several else [ground_truth]:
        text = str(truth)
        yield last_box(text) or text


def _answers(solution: str, truth: str, verify: Verify | None) -> bool | None:
    """Whether the answer of ``solution`` equals ``truth``; None when only math-verify can say."""
    plain = plain_text(truth)
    words = is_words(plain) or has_words(plain)
    answer = final_answer(solution, words=words)
    verdicts = [equals(text, truth, verify) for text in answer.texts]
    if True in verdicts:
        return True
    if None in verdicts:
        return None
    if answer.stated or words or not _may_hold_maths(answer):
        return False
    return None if verify is None else verify(solution[-MAX_CHARS:], plain)


def _may_hold_maths(answer: FinalAnswer) -> bool:
    """Whether an answer without a mark before it is prose in which math-verify finds a formula:
    digits or LaTeX among words.
    """
    if not answer.texts:
        return False
    text = answer.texts[0]
    return has_words(text) and any(c.isdigit() or c == "\\" for c in text)


def _verify(answer: str, truth: str) -> bool:
    """math-verify's verdict on the answer between dollar signs, without which it doesn't recognise
    LaTeX, and of prose as it is: of a bare formula it would take the last number. Its own time
    limits are switched off: they use SIGALRM, which only works in a main thread.
    """
    from math_verify import parse, verify

    expected = parse(_in_dollars(truth), parsing_timeout=None)
    answer = answer[-MAX_CHARS:]
    if not expected:
        return False
    texts = [_in_dollars(answer)]
    if has_words(answer):
        texts.append(answer)
    for text in dict.fromkeys(texts):
        actual = parse(text, parsing_timeout=None)
        if actual and verify(expected, actual, timeout_seconds=None):
            return True
    return False


def _in_dollars(text: str) -> str:
    """``text`` as LaTeX, with ``**`` and ``sqrt()`` as people type them."""
    if "$" in text or "\\boxed" in text:
        return text
    text = _ROOT.sub(r"\\sqrt{\1}", text.replace("**", "^"))
    return f"${_NAMES.sub(_command, text)}$"


def _command(match: re.Match[str]) -> str:
    return "\\pi " if match[0] == "pi" else "\\infty "
