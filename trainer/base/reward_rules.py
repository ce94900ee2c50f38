"""Which built-in rule judges the answers of a data source."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

RuleName = Literal["maths", "multiple_choice", "exact_match", "search_em"]
RULES: tuple[RuleName, ...] = get_args(RuleName)
DEFAULT: RuleName = "maths"
"""Judges the sources that nothing else names."""

BY_SOURCE: dict[str, RuleName] = {
    "openai/gsm8k": "maths",
    "lighteval/MATH": "maths",
    "DigitalLearningGmbH/MATH-lighteval": "maths",
    "HuggingFaceH4/MATH-500": "maths",
    "math_dapo": "maths",
    "math": "maths",
    "math_dapo_reasoning": "maths",
    "aime*": "maths",
    "numina_*": "maths",
    "hiyouga/geometry3k": "maths",
    "cais/mmlu": "multiple_choice",
    "TIGER-Lab/MMLU-Pro": "multiple_choice",
    "allenai/ai2_arc": "multiple_choice",
    "tau/commonsense_qa": "multiple_choice",
    "Idavidrein/gpqa": "multiple_choice",
    "searchR1_*": "search_em",
}
"""verl's ``data_source`` (its ``default_compute_score``) and names of well-known sets -> the rule.
``*`` stands for any characters.
"""
CODE_SOURCES = ("codecontests", "apps", "codeforces", "taco")
"""verl's sources whose answers are programs, which no built-in rule runs."""


def rule_of(source: str, rules: Mapping[str, RuleName]) -> RuleName | None:
    """The rule of ``reward.rules`` for a data source, or else the built-in one; a whole name counts
    before a pattern, and of patterns the longest. None when nothing names the source.
    """
    return _found(source, rules) or _found(source, BY_SOURCE)


def rule_or_default(source: str, rules: Mapping[str, RuleName]) -> RuleName:
    """The rule that judges a data source: ``DEFAULT`` when nothing names it."""
    return rule_of(source, rules) or DEFAULT


def matches(source: str, name: str) -> bool:
    """Whether ``name`` of a table is the data source, or a pattern of it."""
    return source == name or fnmatchcase(source, name)


def _found(source: str, rules: Mapping[str, RuleName]) -> RuleName | None:
    if source in rules:
        return rules[source]
    matching = [pattern for pattern in rules if matches(source, pattern)]
    return rules[max(matching, key=len)] if matching else None
