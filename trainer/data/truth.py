"""Right answers that the built-in rules can compare with."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from trainer.base.errors import UserError
from trainer.base.reward_rules import RuleName

_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:,\d{3})*(?:\.\d+)?$)")


def final_answer(answer: Any) -> Any:
    """GSM8K's answer after its last ``####``, without thousands commas; other answers unchanged."""
    if isinstance(answer, str) and "####" in answer:
        return _THOUSANDS.sub("", answer.rsplit("####", 1)[1].strip())
    return answer


def rule_truth(value: Any, key: str, location: str, rule: RuleName = "maths") -> Any:
    """``value`` of field ``key`` as ``rule`` compares with it: a text or number, or a list of them
    of which one has to be met.

    Raises UserError, which names the row, for what no response could ever equal.
    """
    if rule == "search_em":
        value = _targets(value)
    if isinstance(value, list | tuple):
        if not value:
            raise _refused(key, location, "an empty list", rule)
        return [_single(item, key, location, rule) for item in value]
    return _single(value, key, location, rule)


def _targets(value: Any) -> Any:
    """The answers of Search-R1's ``{"target": [...]}``; any other value unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parsed(value)
    return value["target"] if isinstance(value, Mapping) and "target" in value else value


def _single(value: Any, key: str, location: str, rule: RuleName) -> Any:
    if rule == "maths" and isinstance(value, str) and value.lstrip().startswith("{"):
        value = _parsed(value)
    if isinstance(value, Mapping):
        inner = list(map(str, value))
        hint = f": set data.answer_key={key}.{inner[0]}" if len(inner) == 1 else ""
        raise _refused(
            key, location, f"an object with {', '.join(inner) or 'no fields'}", rule, hint
        )
    if isinstance(value, list | tuple):
        raise _refused(key, location, "a list of lists", rule)
    if isinstance(value, bytes):
        raise _refused(key, location, "bytes", rule)
    if isinstance(value, float) and not math.isfinite(value):
        raise _refused(key, location, str(value), rule)
    if rule == "multiple_choice" and not isinstance(value, str):
        hint = ": write the letter of the right choice, which a number may count from 0 or from 1"
        raise _refused(key, location, f"the number {value}", rule, hint)
    answer = final_answer(value) if rule == "maths" else value
    if answer is None or not str(answer).strip():
        raise _refused(key, location, "nothing", rule)
    return answer


def _parsed(text: str) -> Any:
    """The object of a JSON text; ``text`` itself when it is none, such as a set in LaTeX."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _refused(key: str, location: str, found: str, rule: RuleName, hint: str = "") -> UserError:
    return UserError(
        f"{location}: field '{key}' holds {found}, which the built-in {rule} rule can't compare a "
        "response with: it takes a text, a number, or a list of them of which one is enough"
        f"{hint}. A dot in data.answer_key goes into a nested field; custom_reward_function.path "
        "names a function that gets the field as it is"
    )
