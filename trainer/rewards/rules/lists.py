"""Answers that are several: lists, tuples, intervals, sets, and alternatives."""

from __future__ import annotations

import re
from dataclasses import dataclass

_OPEN = "([{"
_CLOSE = ")]}"
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)")
_BETWEEN = re.compile(r"\s+(?:or|and)\s+|\s*;\s*", re.IGNORECASE)
_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])|±")
_MOST = 1000


@dataclass(frozen=True, kw_only=True)
class Listed:
    """The items of an answer with what encloses them."""

    brackets: str
    """``()``, ``[]``, ``(]``, ``[)``; ``{}`` for a set; empty where nothing encloses them."""
    items: tuple[str, ...]


def listed(text: str) -> Listed | None:
    """The items of a plain ``text`` that has several, or that is a set; None for one item."""
    brackets, inner = _enclosed(text)
    items = _items(inner, bare=not brackets)
    if brackets in ("", "{}"):
        items = [signed for item in items for signed in _signed(item)]
    if len(items) > _MOST or not all(items):
        return None
    if len(items) < 2 and brackets != "{}":
        return None
    return Listed(brackets=brackets, items=tuple(items))


def _signed(item: str) -> list[str]:
    """The two values of an item with a plus-minus sign; other items unchanged."""
    if len(_PLUS_MINUS.findall(item)) != 1:
        return [item]
    return [_PLUS_MINUS.sub(sign, item) for sign in ("+", "-")]


def _enclosed(text: str) -> tuple[str, str]:
    """The brackets around the whole of ``text``, and what is between them."""
    plain = text.replace("\\{", "{").replace("\\}", "}")
    if len(plain) < 2 or plain[0] not in _OPEN or plain[-1] not in _CLOSE:
        return "", text
    depth = 0
    for position, character in enumerate(plain):
        depth += (character in _OPEN) - (character in _CLOSE)
        if depth == 0 and position < len(plain) - 1:
            return "", text
    if depth != 0:
        return "", text
    return plain[0] + plain[-1], plain[1:-1].strip()


def _items(text: str, *, bare: bool) -> list[str]:
    """``text`` split at the commas outside of brackets; without brackets around it, at "or", "and"
    and semicolons as well.
    """
    keeps_thousands = ", " in text
    items: list[str] = []
    depth = 0
    start = 0
    position = 0
    while position < len(text):
        character = text[position]
        thousands = _THOUSANDS.match(text, position) if keeps_thousands else None
        if thousands is not None and not text[position - 1 : position].isdigit():
            position = thousands.end()
            continue
        depth += (character in _OPEN) - (character in _CLOSE)
        between = _BETWEEN.match(text, position) if bare and depth == 0 else None
        if depth == 0 and (character == "," or between is not None):
            items.append(text[start:position].strip())
            start = position + 1 if between is None else between.end()
            position = start
            following = re.compile(r"\s*(?:and|or)\s+", re.IGNORECASE).match(text, position)
            if following is not None and bare:
                start = position = following.end()
            continue
        position += 1
    items.append(text[start:].strip())
    return items
