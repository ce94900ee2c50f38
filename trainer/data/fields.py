"""Which fields of a row hold prompt, response, answer and source, and what they must look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import UserError, nearest

Message = dict[str, Any]
VERL_ANSWER = "reward_model.ground_truth"
"""Where verl's data preparation puts the right answer."""
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Names of the fields; a dot goes into a nested one (``reward_model.ground_truth``)."""

    prompt: str = "prompt"
    response: str | None = None
    """None: responses aren't read (RL)."""
    answer: str | None = "answer"
    """None: nobody needs a right answer."""
    answer_required: bool = True
    data_source: str = "data_source"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a row says, before tokens."""

    prompt: str | list[Message]
    response: str | None
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """Field ``key`` of a row, or ``KeyError``. The whole name is tried before it is taken apart at
    its dots.
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
    """GSM8K's answer after its last ``####`` without thousands commas; anything else as it is."""
    if isinstance(answer, str) and "####" in answer:
        return answer.rsplit("####", 1)[1].strip().replace(",", "")
    return answer


def read_sample(row: Mapping[str, Any], keys: Keys, place: str, default_source: str) -> Sample:
    """The sample in ``row``. Raises UserError naming ``place`` (file and row), field, and what to
    type.
    """
    prompt = _prompt(_field(row, keys.prompt, "data.prompt_key", place), keys.prompt, place)
    response = None
    if keys.response is not None:
        response = _text(
            _field(row, keys.response, "data.response_key", place), keys.response, place
        )
    try:
        source = lookup(row, keys.data_source)
    except KeyError:
        source = None
    extra = row.get("extra_info")
    return Sample(
        prompt=prompt,
        response=response,
        ground_truth=final_answer(_answer(row, keys, place)),
        data_source=default_source if source is None else str(source),
        extra_info=dict(extra) if isinstance(extra, Mapping) else {},
    )


def _answer(row: Mapping[str, Any], keys: Keys, place: str) -> Any:
    if keys.answer is None:
        return None
    try:
        value = lookup(row, keys.answer)
    except KeyError:
        try:
            value = lookup(row, VERL_ANSWER)
        except KeyError:
            if keys.answer_required:
                raise _missing(row, keys.answer, "data.answer_key", place) from None
            return None
    if keys.answer_required and (value is None or (isinstance(value, str) and not value.strip())):
        raise UserError(
            f"{place}: field '{keys.answer}' is empty; every prompt needs a right answer. Remove "
            "the row"
        )
    return value


def _field(row: Mapping[str, Any], key: str, setting: str, place: str) -> Any:
    try:
        return lookup(row, key)
    except KeyError:
        raise _missing(row, key, setting, place) from None


def _missing(row: Mapping[str, Any], key: str, setting: str, place: str) -> UserError:
    found = list(row)
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += [f"{name}.{inner}" for inner in value]
    hint = nearest(key, found) or f"; set {setting} to one of them"
    return UserError(
        f"{place}: no field '{key}' ({setting}). Found: {', '.join(map(str, found))}{hint}"
    )


def _text(value: Any, key: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: field '{key}' must be a text, found {_kind(value)}")
    if not value.strip():
        raise UserError(f"{place}: field '{key}' is empty; fill it in or remove the row")
    return value


def _prompt(value: Any, key: str, place: str) -> str | list[Message]:
    if isinstance(value, str):
        return _text(value, key, place)
    if not isinstance(value, list):
        raise UserError(
            f"{place}: field '{key}' must be a text or a list of chat messages, found "
            f"{_kind(value)}"
        )
    if not value:
        raise UserError(f"{place}: field '{key}' is empty; fill it in or remove the row")
    messages: list[Message] = []
    for k, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise UserError(
                f"{place}: field '{key}', message {k} must have 'role' and 'content', found "
                f"{_kind(message)}"
            )
        if not isinstance(message["content"], str):
            raise UserError(
                f"{place}: field '{key}', message {k}: content must be a text; images aren't "
                "supported"
            )
        messages.append(
            {k: v for k, v in message.items() if v is not None}
        )  # Arrow fills absent keys with nulls
    if not any(m["content"].strip() for m in messages if m["role"] == "user"):
        raise UserError(
            f"{place}: field '{key}' has no user message with text; fill it in or remove the row"
        )
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{place}: field '{key}' ends with an assistant message; a prompt ends where the "
            "answer begins. "
            "Move that message to the response field"
        )
    return messages


def _kind(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'no fields'}"
    return "nothing (null)" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
