"""Where a response states its answer: after ``####``, in the last box, or in prose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_CHARS = 4000
"""Longest answer that is looked at; the patterns are slow on long texts."""
_MOST_MARKS = 50
"""Of the ``####``, boxes and phrases of a response the last ones are looked at."""

_HASHES = re.compile(r"#{4,}([^\n]*)")
_MATHS = re.compile(r"\d|\\[a-zA-Z({\[]|\$[^$\s]|(?<![a-zA-Z])[a-zA-Z]\s?[-+*/^=<>]")
_HEADING = re.compile(
    r"\W*(?:(?:step|part|case|section|problem|question|example|method|solution|approach|exercise)"
    r"\s+\d+\b|\d+[.)]\s+[A-Za-z])",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{|[0-9a-zA-Z])")
_MARKS = r"[*_`\s]{0,6}"
_ANCHOR = re.compile(
    rf"\banswer\b{_MARKS}(?:(?:to|for)\b[^.:\n]{{0,80}}?)?{_MARKS}"
    rf"(?:(?:is|are|was|be|equals|would be|should be|must be)\b{_MARKS}:?|[:=]){_MARKS}"
    rf"|^[#*_ \t]{{0,9}}(?:final )?answer[*_: \t]{{0,9}}\n\s{{0,9}}"
    r"|<answer>",
    re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|</answer>")
_REASON = re.compile(
    r",?\s+(?:because|since|as it|as they|which|so that)\b|,\s+(?:it|they|this|that|there|we)\b",
    re.IGNORECASE,
)
_STATES = re.compile(
    r"(?:\b(?:is|are|equals|gives|get|be|choose|pick|select)\b|[=:])\s*(?=[^=:]{0,200}$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class FinalAnswer:
    """What a response gives as its answer."""

    texts: tuple[str, ...]
    """Ways to read it, the longest first: one that equals the truth is enough."""
    stated: bool
    """A mark or a phrase says that this is the answer. False: it is merely how the text ends."""


def final_answer(solution: str, *, words: bool = False) -> FinalAnswer:
    """The answer of a response.

    It follows the last ``####`` with a number, maths or a box on its line; else it is in the last
    box that is not empty; else it follows the last "the answer is" or the like, or a ``####`` with
    words. Without any of them it is the text itself. ``words``: the truth is a word, so that a
    phrase without maths may hold the answer.
    """
    marked = _after_hashes(solution)
    if marked is not None:
        return FinalAnswer(texts=(marked,), stated=True)
    box = last_box(solution)
    if box is not None:
        return FinalAnswer(texts=(box,), stated=True)
    said = _in_prose(solution, words=words)
    if said:
        return FinalAnswer(texts=said, stated=True)
    return _unmarked(solution)


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` or ``\fbox{}`` that is closed and not empty."""
    for match in reversed(list(_BOX.finditer(text))[-_MOST_MARKS:]):
        if match[1] != "{":
            return match[1]
        content = _braced(text, match.end())
        if content is not None and content.strip():
            return content.strip()
    return None


def _braced(text: str, start: int) -> str | None:
    """The text from ``start`` to the brace that closes the one before it."""
    depth = 1
    for position in range(start, min(len(text), start + MAX_CHARS)):
        if text[position] == "{":
            depth += 1
        elif text[position] == "}":
            depth -= 1
        if depth == 0:
            return text[start:position]
    return None


def _after_hashes(solution: str) -> str | None:
    """The line after the last ``####`` that holds a number, maths or a box."""
    for match in reversed(list(_HASHES.finditer(solution))[-_MOST_MARKS:]):
        line = match[1][:MAX_CHARS].strip()
        box = last_box(line)
        if box is not None:
            return box
        if _MATHS.search(line) and not _HEADING.match(line):
            return _after_label(line)
    return None


def _after_label(line: str) -> str:
    """``line`` without "the answer is" or the like before the answer."""
    match = _ANCHOR.search(line)
    return line if match is None else line[match.end() :]


def _in_prose(solution: str, *, words: bool) -> tuple[str, ...]:
    """What follows the last phrase that announces an answer, or a ``####`` with words."""
    ends = [match.end() for match in _ANCHOR.finditer(solution)]
    ends += [match.start(1) for match in _HASHES.finditer(solution)]
    for end in sorted(ends, reverse=True)[:_MOST_MARKS]:
        line = solution[end : end + MAX_CHARS].lstrip("*_` \t").split("\n", 1)[0]
        line = line.split("</answer>", 1)[0].strip()
        if not line and solution[end : end + 1] == "\n":
            continue
        display = _display(solution[end : end + MAX_CHARS].lstrip("*_` \t\n"))
        if display is not None:
            return (display,)
        if line and (words or _MATHS.search(line)) and not _is_heading(solution, end):
            return tuple(dict.fromkeys(_readings(line.strip("*_` "))))
    return ()


def _is_heading(solution: str, start: int) -> bool:
    """Whether the text at ``start`` follows ``####`` and is no answer: other text comes after."""
    if not solution[:start].endswith("####"):
        return False
    line, _, rest = solution[start:].partition("\n")
    return bool(_HEADING.match(line)) or bool(rest.strip())


def _display(text: str) -> str | None:
    """The formula of a text that begins with a displayed one, over several lines."""
    for opening, closing in (("$$", "$$"), ("\\[", "\\]"), ("\\begin{", None)):
        if not text.startswith(opening):
            continue
        if closing is None:
            environment = re.match(r"\\begin\{(\w+)\}.*?\\end\{\1\}", text, re.DOTALL)
            return environment[0] if environment else None
        end = text.find(closing, len(opening))
        return text[len(opening) : end].strip() if end > 0 else None
    return None


def _readings(line: str) -> Iterator[str]:
    """The line, its first sentence, and that without a reason after it."""
    yield line
    end = _SENTENCE_END.search(line)
    sentence = line if end is None else line[: end.start()]
    yield sentence
    reason = _REASON.search(sentence)
    if reason is not None:
        yield sentence[: reason.start()]


def _unmarked(solution: str) -> FinalAnswer:
    """The whole text when it is one line, its last line, and what that line says at its end."""
    text = solution.strip()
    lines = [line.strip(" \t#") for line in text[-MAX_CHARS:].splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return FinalAnswer(texts=(), stated=False)
    last = lines[-1]
    texts = [text] if len(text) <= MAX_CHARS else []
    texts.append(last)
    states = _STATES.search(last)
    if states is not None:
        texts.append(last[states.end() :])
    return FinalAnswer(texts=tuple(dict.fromkeys(texts)), stated=False)
