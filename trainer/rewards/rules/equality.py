"""Whether an answer equals the truth: words as words, numbers exactly, lists item by item."""

from __future__ import annotations

import re
from collections.abc import Callable

from trainer.rewards.rules.lists import Listed, listed
from trainer.rewards.rules.plain_text import (
    has_words,
    is_words,
    plain_text,
    same_words,
    without_parentheses,
)
from trainer.rewards.rules.quantities import only_quantity, quantity, same_quantity, spelled

Verify = Callable[[str, str], bool]
"""math-verify's verdict on (answer, truth)."""

_CHOICE = re.compile(r"(?:\(([A-Ka-k])\)|([A-K])[).:])\s*(\S.*)?", re.DOTALL)
_NAMED = re.compile(
    r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?(?:'|\([^()]*\))?|\\angle\s?[A-Z]+|\([a-z](?:,\s*[a-z])*\)|[^\W\d_][^\d\\+*/^=<>]*"
)
_ELEMENT = re.compile(r"[a-zA-Z]\s*(?:\\in(?![a-zA-Z])|∈)\s*")
_EQUALS = re.compile(r"(?<![<>!=:])=(?!=)")
_BASE = re.compile(r"(\w+)_\{?(\d+)\}?")
_VARIABLE = re.compile(r"([a-zA-Z])\s*=(?:[^a-zA-Z=]|\\[a-zA-Z]+)*")
_TIME = re.compile(r"\d{1,2}:\d\d\b")
_RELATION = re.compile(r"[<>≤≥]|\\[lg]eq?(?![a-zA-Z])")
_MATHS_WORDS = frozenset(("pi", "infinity", "inf", "infty"))
_DEEPEST = 6


def equals(answer: str, truth: str, verify: Verify | None = None, depth: int = 0) -> bool | None:
    """Whether ``answer`` equals ``truth``; None when only math-verify can say, and ``verify`` is
    not given.
    """
    a = plain_text(answer)
    t = plain_text(truth)
    if not a or not t:
        return False
    if a == t:
        return True
    if depth > _DEEPEST:
        return False
    simple = _simple(a, t)
    if simple is not None:
        return simple
    sides = _sides(a, t)
    if sides != (a, t):
        return equals(*sides, verify, depth + 1)
    number = quantity(t)
    said = only_quantity(a)
    if number is not None and said is not None:
        return same_quantity(said, number)
    items = listed(a)
    true_items = listed(t)
    if items is None and (true_items is None or number is not None):
        return _same_maths(a, t, verify)
    if None in (items, true_items) and _RELATION.search(f"{a} {t}"):  # x <= 3 is an interval
        return None if verify is None else verify(a, t) or verify(t, a)
    return _same_lists(items or _one(a), true_items or _one(t), verify, depth)


def _simple(a: str, t: str) -> bool | None:
    """The verdict on two numbers, two texts of words, or a choice; None for others."""
    number = quantity(a) or spelled(a)
    true_number = quantity(t)
    if number is not None and true_number is not None:
        if same_quantity(number, true_number):
            return True
        return None if "," in t and listed(t) else False
    choice = _choice(a, t)
    if choice is not None:
        return choice
    several = listed(a) is not None or listed(t) is not None
    if is_words(t) and not _is_maths_name(t):
        same = is_words(a) and same_words(a, t)
        return None if several and not same else same
    if has_words(t) and true_number is None and not several and "=" not in t:
        return a.casefold() == t.casefold()
    if is_words(a) and not _is_maths_name(a) and not several:
        return False
    return None


def _is_maths_name(text: str) -> bool:
    return text.lower() in _MATHS_WORDS or len(without_parentheses(text)) == 1


def _choice(a: str, t: str) -> bool | None:
    """The verdict where one is the letter of a choice and the other a letter with its text."""
    letter = choice_letter(a)
    true_letter = choice_letter(t)
    if letter is None or true_letter is None:
        return None
    return letter.upper() == true_letter.upper()


def choice_letter(text: str) -> str | None:
    """The letter of a choice, ``B``, ``(B)``, ``B. Paris`` or ``option B``; None for others."""
    match = _CHOICE.fullmatch(text)
    if match is not None:
        return match[1] or match[2]
    option = re.fullmatch(
        r"(?:(?:the\s+)?(?:option|choice|answer)\s+)?\(?([A-Ka-k])\)?", text, re.I
    )
    return None if option is None else option[1]


def _one(text: str) -> Listed:
    return Listed(brackets="", items=(text,))


def _same_lists(a: Listed, t: Listed, verify: Verify | None, depth: int) -> bool | None:
    """Whether two lists have equal items, in order unless both are sets. Without brackets around
    them, numbers and formulas are a set, as math-verify has it, and words are in order.
    """
    if len(a.items) != len(t.items):
        return False
    if a.brackets != t.brackets and not {"", "{}"} & {a.brackets, t.brackets}:
        return False
    if not (_is_set(a) and _is_set(t)):
        verdicts = [
            equals(item, truth, verify, depth + 1)
            for item, truth in zip(a.items, t.items, strict=True)
        ]
        return _all(verdicts)
    return _same_sets(list(a.items), list(t.items), verify, depth)


def _is_set(items: Listed) -> bool:
    if items.brackets == "{}":
        return True
    return not items.brackets and not any(is_words(plain_text(item)) for item in items.items)


def _same_sets(
    items: list[str], truths: list[str], verify: Verify | None, depth: int
) -> bool | None:
    """Whether every truth has an item of its own that equals it."""
    unknown = False
    for truth in truths:
        verdicts = [equals(item, truth, verify, depth + 1) for item in items]
        if True in verdicts:
            del items[verdicts.index(True)]
        elif None in verdicts:
            unknown = True
        else:
            return False
    return None if unknown else True


def _all(verdicts: list[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _sides(a: str, t: str) -> tuple[str, str]:
    """Answer and truth without the name before ``=`` or ``\\in`` where just one has it, or both
    have the same.
    """
    a = _ELEMENT.sub("", a, count=1) if _ELEMENT.match(a) else a
    t = _ELEMENT.sub("", t, count=1) if _ELEMENT.match(t) else t
    parts = _equation(a)
    true_parts = _equation(t)
    if len(parts) == len(true_parts):
        same_name = len(parts) == 2 and _bare(parts[0]) == _bare(true_parts[0])
        return (parts[1].strip(), true_parts[1].strip()) if same_name else (a, t)
    if len(true_parts) == 1:
        return _value(parts, a), t
    if len(parts) == 1:
        return a, _value(true_parts, t)
    return a, t


def _equation(text: str) -> list[str]:
    """The sides of an equation; the whole text when it is none, or a list of them."""
    return [text] if listed(text) is not None else _EQUALS.split(text)


def _bare(text: str) -> str:
    return text.replace(" ", "")


def _value(parts: list[str], whole: str) -> str:
    """The side of an equation that is the value: behind a name or a calculation with numbers."""
    first = parts[0].strip()
    last = parts[-1].strip()
    if not first or not last:
        return whole
    if _NAMED.fullmatch(first) or not re.search("[a-zA-Z]", first):
        return first if _NAMED.fullmatch(last) and not _NAMED.fullmatch(first) else last
    return whole


def _same_maths(a: str, t: str, verify: Verify | None) -> bool | None:
    """Whether two formulas are equal: numbers of a base, times, or else what math-verify says."""
    bases = [_BASE.fullmatch(text) for text in (a, t)]
    if bases != [None, None]:
        return None not in bases and len({match and match.groups() for match in bases}) == 1
    if _TIME.match(a) and _TIME.match(t):
        return re.sub(r"[.\s]", "", a.casefold()) == re.sub(r"[.\s]", "", t.casefold())
    names = [_VARIABLE.fullmatch(text) for text in (a, t)]
    if None not in names and len({match and match[1] for match in names}) == 2:
        return False
    if "\\" not in a and re.search(r"\d\s+\d", a) and not has_words(a):
        return False
    if verify is None:
        return None
    number = quantity(t)
    return verify(a, t if number is None or number.percent else str(number.value))
