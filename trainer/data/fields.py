"""The fields of a row that hold prompt, response, answer and source, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import UserError, nearest

Message = dict[str, Any]
VERL_ANSWER = "reward_model.ground_truth"
"""The field that verl's data preparation uses for the right answer."""


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Names of the fields; a dot names a nested one (``reward_model.ground_truth``)."""

    prompt: str = "prompt"
    response: str | None = None
    """None: responses are not read (RL)."""
    answer: str | None = "answer"
    """None: no right answer is needed."""
    answer_required: bool = True
    data_source: str = "data_source"


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """The contents of a row, before tokens."""

    prompt: str | list[Message]
    response: str | None
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Field ``key`` of a row. The whole name is tried before it is split at its dots.

    Raises KeyError.
    """
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(key)
        value = value[part]
    return value


def final_answer(answer: Any) -> Any:
    """GSM8K's answer after its last ``####``, without thousands commas; other answers unchanged."""
    if isinstance(answer, str) and "####" in answer:
        return answer.rsplit("####", 1)[1].strip().replace(",", "")
    return answer


def read_row(row: Mapping[str, Any], keys: Keys, location: str, default_source: str) -> DataRow:
    """The contents of ``row``.

    Raises UserError that names ``location`` (file and row), the field, and what to type.
    """
    prompt = _prompt(_field(row, keys.prompt, "data.prompt_key", location), keys.prompt, location)
    response = None
    if keys.response is not None:
        response = _text(
            _field(row, keys.response, "data.response_key", location), keys.response, location
        )
    try:
        source = lookup(row, keys.data_source)
    except KeyError:
        source = None
    extra = row.get("extra_info")
    return DataRow(
        prompt=prompt,
        response=response,
        ground_truth=final_answer(_answer(row, keys, location)),
        data_source=default_source if source is None else str(source),
        extra_info=dict(extra) if isinstance(extra, Mapping) else {},
    )


def _answer(row: Mapping[str, Any], keys: Keys, location: str) -> Any:
    if keys.answer is None:
        return None
    try:
        value = lookup(row, keys.answer)
    except KeyError:
        try:
            value = lookup(row, VERL_ANSWER)
        except KeyError:
            if keys.answer_required:
                raise _missing(row, keys.answer, "data.answer_key", location) from None
            return None
    empty = value is None or (isinstance(value, str) and not value.strip())
    if empty and keys.answer_required:
        raise UserError(
            f"{location}: field '{keys.answer}' is empty; every prompt needs a right answer. "
            "Remove the row"
        )
    return value


def _field(row: Mapping[str, Any], key: str, setting: str, location: str) -> Any:
    try:
        return lookup(row, key)
    except KeyError:
        raise _missing(row, key, setting, location) from None


def _missing(row: Mapping[str, Any], key: str, setting: str, location: str) -> UserError:
    fields = list(row)
    for name, value in row.items():
        if isinstance(value, Mapping):
            fields += [f"{name}.{inner}" for inner in value]
    hint = nearest(key, fields) or f"; set {setting} to one of them"
    return UserError(
        f"{location}: no field '{key}' ({setting}). Found: {', '.join(map(str, fields))}{hint}"
    )


def _text(value: Any, key: str, location: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{location}: field '{key}' must be a text, found {_kind(value)}")
    if not value.strip():
        raise UserError(f"{location}: field '{key}' is empty; fill it in or remove the row")
    return value


def _prompt(value: Any, key: str, location: str) -> str | list[Message]:
    if isinstance(value, str):
        return _text(value, key, location)
    if not isinstance(value, list):
        raise UserError(
            f"{location}: field '{key}' must be a text or a list of chat messages, found "
            f"{_kind(value)}"
        )
    if not value:
        raise UserError(f"{location}: field '{key}' is empty; fill it in or remove the row")
    messages: list[Message] = []
    for k, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UserError(
                f"{location}: field '{key}', message {k} must have 'role' and 'content', found "
                f"{_kind(message)}"
            )
        if not isinstance(message["content"], str):
            raise UserError(
                f"{location}: field '{key}', message {k}: content must be a text; images aren't "
                "supported"
            )
        # Arrow fills absent keys with nulls.
        messages.append({name: part for name, part in message.items() if part is not None})
    if not any(m["content"].strip() for m in messages if m["role"] == "user"):
        raise UserError(
            f"{location}: field '{key}' has no user message with text; fill it in or remove the row"
        )
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{location}: field '{key}' ends with an assistant message; a prompt ends where the "
            "answer begins. Move that message to the response field"
        )
    return messages


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'no fields'}"
    if value is None:
        return "nothing (null)"
    return f"{type(value).__name__} {str(value)[:40]!r}"
