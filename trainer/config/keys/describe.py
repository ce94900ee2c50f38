"""The values that a key takes, in words, from the schema."""

from __future__ import annotations

import math
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.base.errors import shortened
from trainer.config.keys.fields import fields
from trainer.config.keys.tree import format_value, known_keys
from trainer.config.schema.base import LARGEST, MOST, TEXT_LENGTH

_BASIC = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


def wrong_value(key: str, value: Any) -> str:
    """The message for a value of the wrong type or outside its range."""
    field = fields().get(key)
    expected = describe(field.annotation, field.metadata) if field else "something else"
    if isinstance(value, str) and value.startswith("[") and "a list" in expected:
        expected += " (this is a text; write every item, such as [8,8])"
    expected += _beyond_all(value)
    default = known_keys().get(key)
    hint = ""
    if default is not None and not default.startswith("${"):
        hint = f"; the default is {key}={default}"
    return f"{key}={shortened(_one_line(format_value(value)))}: expected {expected}{hint}"


def describe(annotation: Any, metadata: Any = ()) -> str:
    """The values that a type allows, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return describe(inner, _limits(extra) + list(metadata))
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(annotation))
    if origin is Literal:
        options = [str(option) for option in get_args(annotation)]
        return options[0] if len(options) == 1 else f"one of {', '.join(options)}"
    if origin is list:
        return f"a list of {describe(get_args(annotation)[0])}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "a group of keys"
    limits = _limits(metadata)
    return _BASIC.get(annotation, str(annotation)) + _range(limits)


def _limits(metadata: Any) -> list[Any]:
    """The single limits inside pydantic's ``Field(...)`` annotations."""
    limits: list[Any] = []
    for item in metadata:
        limits += item.metadata if isinstance(item, FieldInfo) else [item]
    return limits


def _range(limits: list[Any]) -> str:
    """The limits in words, without those that every number has (``MOST``, ``LARGEST``)."""
    words = []
    for limit in limits:
        if isinstance(limit, Ge) and limit.ge != -LARGEST:
            words.append(f"at least {limit.ge}")
        elif isinstance(limit, Gt):
            words.append(f"above {limit.gt}")
        elif isinstance(limit, Le) and limit.le not in (MOST, LARGEST):
            words.append(f"at most {limit.le}")
        elif isinstance(limit, Lt):
            words.append(f"below {limit.lt}")
    return f" ({', '.join(words)})" if words else ""


def _beyond_all(value: Any) -> str:
    """The limit that every number or text has, for a value beyond it."""
    if isinstance(value, str) and len(value) > TEXT_LENGTH:
        return f", at most {TEXT_LENGTH} characters"
    if isinstance(value, str) and not value.isprintable():
        return ", in one line and without control characters"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if isinstance(value, float) and not math.isfinite(value):
        return ", finite"
    if isinstance(value, int) and abs(value) > MOST:
        return f", at most {MOST}"
    return f", at most {LARGEST:g}" if abs(value) > LARGEST else ""


def _one_line(text: str) -> str:
    """``text`` as it can be shown: with escapes for what no terminal should get."""
    if text.isprintable():
        return text
    return text.encode("unicode_escape", "backslashreplace").decode()
