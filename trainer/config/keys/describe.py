"""The values that a key takes, in words, from the schema."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.base.errors import shortened
from trainer.config.keys.fields import fields
from trainer.config.keys.tree import format_value, known_keys

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
    default = known_keys().get(key)
    hint = ""
    if default is not None and not default.startswith("${"):
        hint = f"; the default is {key}={default}"
    return f"{key}={shortened(format_value(value))}: expected {expected}{hint}"


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
    return _BASIC.get(annotation, str(annotation)) + _range(_limits(metadata))


def _limits(metadata: Any) -> list[Any]:
    """The single limits inside pydantic's ``Field(...)`` annotations."""
    limits: list[Any] = []
    for item in metadata:
        limits += item.metadata if isinstance(item, FieldInfo) else [item]
    return limits


def _range(limits: list[Any]) -> str:
    words = []
    for limit in limits:
        if isinstance(limit, Ge):
            words.append(f"at least {limit.ge}")
        elif isinstance(limit, Gt):
            words.append(f"above {limit.gt}")
        elif isinstance(limit, Le):
            words.append(f"at most {limit.le}")
        elif isinstance(limit, Lt):
            words.append(f"below {limit.lt}")
    return f" ({', '.join(words)})" if words else ""
