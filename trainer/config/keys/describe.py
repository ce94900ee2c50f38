"""Says in words what values a key takes, from the schema."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.keys import tree as keys
from trainer.config.keys import verl
from trainer.config.schema import Config

_BASIC = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}


def wrong_value(key: str, value: Any) -> str:
    """The message for a value of the wrong type or outside its range."""
    field = field_of(key)
    expected = describe(field.annotation, field.metadata) if field else "something else"
    reason = verl.UNSUPPORTED_VALUES.get((key, str(value)))
    if reason:
        return f"{key}={value} is not supported: {reason}"
    if isinstance(value, str) and value.startswith("[") and "a list" in expected:
        expected += " (this is a text; write every item, such as [8,8])"
    default = keys.known_keys().get(key)
    hint = (
        f"; the default is {key}={default}"
        if default is not None and not default.startswith("${")
        else ""
    )
    return f"{key}={keys.written(value)}: expected {expected}{hint}"


def field_of(key: str) -> FieldInfo | None:
    """The schema's field for a dotted key."""
    model: type[BaseModel] = Config
    field: FieldInfo | None = None
    for part in key.split("."):
        field = model.model_fields.get(part)
        if field is None:
            return None
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return field


def describe(annotation: Any, metadata: Any = ()) -> str:
    """What values a type allows, in words."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return describe(inner, _limits(extra) + list(metadata))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(describe(part) for part in get_args(annotation))
    if get_origin(annotation) is Literal:
        options = [str(option) for option in get_args(annotation)]
        return options[0] if len(options) == 1 else f"one of {', '.join(options)}"
    if get_origin(annotation) is list:
        return f"a list of {describe(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a group of keys"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a group of keys"
    return _BASIC.get(annotation, str(annotation)) + _range(_limits(metadata))


def _limits(metadata: Any) -> list[Any]:
    """The single limits inside pydantic's ``Field(...)`` annotations."""
    found: list[Any] = []
    for item in metadata:
        found += item.metadata if isinstance(item, FieldInfo) else [item]
    return found


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
