"""Numbers as people write them: thousands, fractions, currencies, percent, units."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

_MAX_DIGITS = 200
"""Longer numbers are not taken as answers; parsing them would take quadratic time."""
_MAX_UNIT = 80

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d{1,3}(?: \d{3})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d{{1,2}}(?!\w))?"
_CURRENCY = re.compile(r"(?:(?:US|CA|AU|HK)?[$£€¥₹]|(?:USD|EUR|GBP)\b)\s*")
_SIGN = re.compile(r"[-+–]\s*")
_LATEX_FRACTION = r"\\frac\s*(?:\{\s*([-+]?\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d)\s?(\d)(?!\d))"
_MIXED = re.compile(rf"(\d+)\s*{_LATEX_FRACTION}")
_FRACTION = re.compile(_LATEX_FRACTION)
_MIXED_PLAIN = re.compile(r"(\d+)(?:\s+|\s+and\s+)(\d+)\s*/\s*(\d+)")
_NUMBER = re.compile(rf"({_DECIMAL})(?:\s*/\s*({_DECIMAL}))?")
_POWER = re.compile(
    rf"({_DECIMAL})\s*(?:\\times|\\cdot|[×·*])\s*10\s*(?:\^|\*\*)\s*"
    r"(?:\{\s*(-?\d{1,2})\s*\}|(-?\d{1,2})(?!\d))"
)
_PERCENT = re.compile(r"(?:%|percent\b|per cent\b|percentage points?\b)\s*", re.IGNORECASE)
_SCALE = re.compile(r"(hundred|thousand|million|billion|trillion)\b\s*", re.IGNORECASE)
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_NOT_UNITS = re.compile(
    r"or|and|to|plus|minus|times|modulo|choose|over|divided|base|factorial|squared|cubed|[xyz]"
    r"|pi|sqrt|sin|cos|tan|cot|log|ln|exp|mod"
)
_SPELLED = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    *("nineteen", "twenty"),
)
_KNOWN = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimeters millimetre millimetres",
        "cm centimeter centimeters centimetre centimetres",
        "m meter meters metre metres",
        "km kilometer kilometers kilometre kilometres",
        "in inch inches",
        "ft foot feet",
        "yd yard yards",
        "mi mile miles",
        "mg milligram milligrams",
        "g gram grams",
        "kg kilogram kilograms",
        "lb lbs pound pounds",
        "oz ounce ounces",
        "ml milliliter milliliters millilitre millilitres",
        "l liter liters litre litres",
        "s sec secs second seconds",
        "min mins minute minutes",
        "h hr hrs hour hours",
        "day days",
        "week weeks",
        "month months",
        "year years yr yrs",
        "cent cents ¢",
        "dollar dollars",
    )
    for name in names.split()
}
"""Units that exclude each other: 5 cm is not 5 m. Others are only looked through."""
_SHORT = frozenset([*_KNOWN, "n", "j", "w", "v", "a", "k", "c", "f", "am", "pm", "of", "hz", "pa"])


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """An exact number with what stands behind it."""

    value: Fraction
    percent: bool = False
    unit: str = ""
    """One of the units that exclude each other; empty for others and for none."""


def quantity(text: str) -> Quantity | None:
    """The number that a plain ``text`` is, with or without a unit; None for any other text.

    Thousands are separated by commas or spaces in groups of three.
    """
    if len(text) > _MAX_DIGITS + _MAX_UNIT:
        return None
    text, negative = _without_prefix(text)
    for pattern, read in _FORMS:
        match = pattern.match(text)
        if match is None or len(match[0]) > _MAX_DIGITS:
            continue
        value = read(match)
        if value is None:
            return None
        return _with_rest(-value if negative else value, match[0], text[match.end() :])
    return None


def spelled(text: str) -> Quantity | None:
    """The number of a word from ``zero`` to ``twenty``; None for other texts."""
    word = text.lower()
    return Quantity(value=Fraction(_SPELLED.index(word))) if word in _SPELLED else None


def same_quantity(first: Quantity, second: Quantity) -> bool:
    """Whether two quantities are equal. 50% is 0.5, and 50 where only one has the sign."""
    if first.unit and second.unit and first.unit != second.unit:
        return False
    if first.percent == second.percent:
        return first.value == second.value
    with_sign, without = (first, second) if first.percent else (second, first)
    return without.value in (with_sign.value, with_sign.value / 100)


def only_quantity(text: str) -> Quantity | None:
    """The number of a phrase that has just one, such as ``she sold 72 clips``; None for others."""
    runs = re.findall(rf"(?<![\w.])[-+]?[$£€]?{_DECIMAL}%?", text)
    if len(runs) != 1 or not re.search(r"[A-Za-z]{2}", text) or re.search(r"[\\^*/=<>(){}_]", text):
        return None
    found: Quantity | None = quantity(runs[0].rstrip("."))
    return found


def _without_prefix(text: str) -> tuple[str, bool]:
    """``text`` without currency and sign in front, and whether the sign was a minus."""
    text = text.strip()
    negative = False
    signed = False
    for pattern in (_CURRENCY, _SIGN, _CURRENCY):
        match = pattern.match(text)
        if match is None or (pattern is _SIGN and signed):
            continue
        if pattern is _SIGN:
            signed = True
            negative = match[0][0] != "+"
        text = text[match.end() :]
    return text, negative


def _quotient(top: str, bottom: str) -> Fraction | None:
    denominator = _exact(bottom)
    return None if denominator == 0 else _exact(top) / denominator


def _exact(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", ""))


def _read_fraction(match: re.Match[str]) -> Fraction | None:
    top, bottom, top_digit, bottom_digit = match.groups()[-4:]
    return _quotient(top or top_digit, bottom or bottom_digit)


def _read_mixed(match: re.Match[str]) -> Fraction | None:
    part = _read_fraction(match)
    return None if part is None else _exact(match[1]) + part


def _read_mixed_plain(match: re.Match[str]) -> Fraction | None:
    part = _quotient(match[2], match[3])
    return None if part is None else _exact(match[1]) + part


def _read_power(match: re.Match[str]) -> Fraction | None:
    return _exact(match[1]) * Fraction(10) ** int(match[2] or match[3])


def _read_number(match: re.Match[str]) -> Fraction | None:
    return _exact(match[1]) if match[2] is None else _quotient(match[1], match[2])


_FORMS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Fraction | None]], ...] = (
    (_MIXED, _read_mixed),
    (_FRACTION, _read_fraction),
    (_MIXED_PLAIN, _read_mixed_plain),
    (_POWER, _read_power),
    (_NUMBER, _read_number),
)


def _with_rest(value: Fraction, digits: str, rest: str) -> Quantity | None:
    """The quantity with what follows its digits: percent, a scale, a unit, a remark."""
    spaced = rest[:1] == " "
    rest = rest.strip()
    percent = _PERCENT.match(rest)
    if percent is not None:
        rest = rest[percent.end() :]
    scale = _SCALE.match(rest)
    if scale is not None:
        value *= 10 ** _SCALES[scale[1].lower()]
        rest = rest[scale.end() :]
    rest = rest.strip(" $£€.")
    if not rest:
        return Quantity(value=value, percent=percent is not None)
    unit = _unit(rest, spaced=spaced or percent is not None or scale is not None)
    if unit is None:
        return None
    return Quantity(value=value, percent=percent is not None, unit=unit)


def _unit(text: str, *, spaced: bool) -> str | None:
    """What ``text`` measures in, if it is a unit of those known; None when it is no unit."""
    if len(text) > _MAX_UNIT:
        return None
    remark = re.fullmatch(r"\([^()]*[^\W\d_][^()]*\)", text)
    if remark is not None:
        return ""
    body = re.sub(r"\s*\([^()]*\)$", "", text)
    bare = re.sub(r"\^\{?-?\d\}?|[²³]", "", body)
    if re.fullmatch(r"[°¢'’\"][A-Za-z]?", bare):
        return _KNOWN.get(bare, "")
    if not re.fullmatch(r"[^\W\d_][^\d_\\=+*^<>(){}\[\];:|]*", bare):
        return None
    first = re.split(r"[\s/.\-,·]", bare, maxsplit=1)[0].lower()
    if _NOT_UNITS.fullmatch(first) or re.search(r"(?:^|[\s,])(?:or|and|to)\b", bare):
        return None
    if len(first) <= 2 and first not in _SHORT:
        return None
    if not spaced and len(first) == 1:
        return None
    alone = bare.strip().lower() if body == bare else ""
    return _KNOWN.get(alone, "")
