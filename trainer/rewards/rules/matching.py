"""The rules that compare texts: multiple choice, exact match, and exact match with aliases."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

from trainer.rewards.rules.equality import choice_letter
from trainer.rewards.rules.final_answer import FinalAnswer, final_answer
from trainer.rewards.rules.lists import listed
from trainer.rewards.rules.plain_text import plain_text, same_words

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_ANNOUNCED = re.compile(r"\banswer is:?\s+|#{4,}[ \t]*", re.IGNORECASE)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def multiple_choice(solution: str, ground_truth: Any) -> float:
    """1.0 when the answer names the letter of the truth, or all letters of several; or, for a truth
    that is no letter, when it has the same words. Of a list of truths one is enough.
    """
    texts = [plain_text(text) for text in _texts(solution)]
    for truth in map(plain_text, _truths(ground_truth)):
        letters = _letters(truth)
        for text in texts:
            if letters is not None and _letters(text) == letters:
                return 1.0
            if letters is None and text and (text == truth or same_words(text, truth)):
                return 1.0
    return 0.0


def exact_match(solution: str, ground_truth: Any) -> float:
    """1.0 when the answer is the truth character by character, white space apart; of a list of
    truths one is enough.
    """
    answers = {_spaced(text) for text in (*_texts(solution), *_announced(solution))}
    answers |= {text.removesuffix(".") for text in answers}
    return float(any(_spaced(truth) in answers for truth in _truths(ground_truth)))


def search_em(solution: str, ground_truth: Any) -> float:
    """1.0 when the answer is one of the truths after the normalisation of SQuAD's exact match
    (arXiv 1606.05250, section 6.1): case, punctuation, articles and white space are ignored.
    """
    answers = {_normal(text) for text in _texts(solution)}
    return float(any(_normal(truth) in answers for truth in _truths(ground_truth)))


def _texts(solution: str) -> Iterable[str]:
    """Ways to read the answer: what the last ``<answer>`` encloses, or else the final answer."""
    tagged = _TAGGED.findall(solution)
    if tagged:
        return (tagged[-1].strip(),)
    found: FinalAnswer = final_answer(solution, words=True)
    return found.texts


def _announced(solution: str) -> Iterable[str]:
    """All of the text behind the first phrase that announces an answer, over several lines."""
    match = _ANNOUNCED.search(solution)
    return () if match is None else (solution[match.end() :],)


def _truths(ground_truth: Any) -> Iterable[str]:
    several = isinstance(ground_truth, list | tuple)
    return [str(truth) for truth in (ground_truth if several else [ground_truth])]


def _letters(text: str) -> frozenset[str] | None:
    """The letters of the choices that a plain text names; None when it names something else."""
    single = choice_letter(text)
    if single is not None:
        return frozenset(single.upper())
    several = listed(text)
    if several is None:
        return None
    letters = [choice_letter(item) for item in several.items]
    return frozenset(str(letter).upper() for letter in letters) if None not in letters else None


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _normal(text: str) -> str:
    """The text as SQuAD compares it; as it is, when nothing would be left."""
    bare = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split()) or _spaced(text)
