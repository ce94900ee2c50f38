"""An answer without what only dresses it: markdown, LaTeX's spaces and fonts."""

from __future__ import annotations

import re

_REPLACED = (
    (re.compile(r"[\u00a0\u2000-\u200a\u202f\u205f\u3000]"), " "),
    (re.compile("[\u200b\u2060\ufeff]"), ""),
    (re.compile("[\u2212\ufe63\uff0d]"), "-"),
    (re.compile(r"``([^`']+)''"), r'"\1"'),
    (re.compile(r"`+"), ""),
    (re.compile(r"\*\*([^*]+)\*\*"), r"\1"),
    (re.compile(r"__([^_]+)__"), r"\1"),
    (re.compile(r"\\([$%#&])"), r"\1"),
    (re.compile(r"(?<!\\)\\!"), ""),
    (re.compile(r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])"), " "),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\color\s*\{\w+\}"), ""),
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|displaystyle|big|Big|bigg|Bigg)(?![a-zA-Z])"), ""),
    (re.compile(r"\\langle(?![a-zA-Z])"), "("),
    (re.compile(r"\\rangle(?![a-zA-Z])"), ")"),
    (re.compile(r"\\varnothing(?![a-zA-Z])|∅|\\\{\s*\\\}"), r"\\emptyset"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])"), "°"),
)
_FONT = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|operatorname|emph|underline|bf|rm)"
    r"\s*\{([^{}]*)\}"
)
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{\w+\*?\}")
_WRAPPED = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("*", "*"),
    ("_", "_"),
    ('"', '"'),
    ("'", "'"),
    ("“", "”"),
    ("‘", "’"),
)
_ABOUT = re.compile(
    r"(?:\\approx(?![a-zA-Z])|≈|~|approximately\b|about\b|roughly\b)\s*", re.IGNORECASE
)
_WORDS = re.compile(r"[^\W\d_]+(?:[-'’. ]+[^\W\d_]+)*")
_LONG_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}")
_MATHS_NAMES = re.compile(
    r"a?(?:sin|cos|tan|cot|sec|csc)|arc(?:sin|cos|tan)|log|exp|sqrt|inf(?:inity)?|deg|mod|max|min"
)


def plain_text(text: str) -> str:
    """``text`` without markdown, dollar signs around it, LaTeX's spaces and fonts, and a full stop
    at its end.
    """
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    for _ in range(3):  # fonts in fonts
        text = _FONT.sub(r" \1 ", text)
    text = re.sub(r"\s+\^", "^", re.sub(r"\s+", " ", text)).strip()
    before = ""
    while before != text:
        before = text
        text = _unwrapped(text.rstrip(".,;: ").removesuffix("**").strip())
        text = _ABOUT.sub("", text, count=1) if _ABOUT.match(text) else text
    return text


def _unwrapped(text: str) -> str:
    for opening, closing in _WRAPPED:
        size = len(opening)
        inner = text[size : len(text) - size]
        if len(text) <= 2 * size or not text.startswith(opening) or not text.endswith(closing):
            continue
        if opening.strip("\\([") and opening in inner:
            continue
        return inner.strip()
    return text


def is_words(text: str) -> bool:
    """Whether a plain text is words or single letters, in parentheses or not, without maths."""
    return _WORDS.fullmatch(without_parentheses(text)) is not None


def has_words(text: str) -> bool:
    """Whether a plain text has a word of three letters that is no name of mathematics."""
    return any(
        _MATHS_NAMES.fullmatch(word.lower()) is None
        for word in _LONG_WORD.findall(_ENVIRONMENT.sub(" ", text))
    )


def without_parentheses(text: str) -> str:
    """``(B)`` as ``B``; ``even (2 divides it)`` as ``even``."""
    if text.startswith("(") and text.find(")") == len(text) - 1:
        return text[1:-1].strip()
    head, bracket, rest = text.partition(" (")
    return head.strip() if bracket and rest.endswith(")") and rest.count("(") == 0 else text


def same_words(first: str, second: str) -> bool:
    """Whether two texts are the same words in the same order, whatever their case and articles."""
    return _normal(first) == _normal(second)


def _normal(text: str) -> str:
    words = re.findall(r"[^\W_]+", without_parentheses(text).casefold())
    if len(words) > 1 and words[0] in ("a", "an", "the") and len(words[1]) > 1:
        words = words[1:]
    if len(words) == 2 and words[0] in ("option", "choice", "answer") and len(words[1]) == 1:
        words = words[1:]
    single = all(len(word) == 1 for word in words)
    return ("" if single else " ").join(words)
