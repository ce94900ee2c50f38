"""The fields of a row that hold prompt, response, answer and source, and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.base.errors import UserError, nearest
from trainer.base.reward_rules import RuleName, rule_or_default
from trainer.data.messages import Message, read_answer, read_prompt, refuse_unread
from trainer.data.truth import rule_truth

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
    maths_rule: bool = True
    """Built-in rules judge: right answers must be such that they can. False: a user's function
    gets them as they are.
    """
    rules: Mapping[str, RuleName] = field(default_factory=dict)
    """``reward.rules``: data source -> the rule that judges it."""


@dataclass(frozen=True, kw_only=True)
class DataRow:
    """The contents of a row, before tokens."""

    prompt: str | list[Message]
    response: str | None
    ground_truth: Any
    data_source: str
    extra_info: dict[str, Any]
    turns: list[Message] | None = None
    """The answer as messages, the first of them the assistant's; ``response`` is then None."""


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


def read_row(row: Mapping[str, Any], keys: Keys, location: str, default_source: str) -> DataRow:
    """The contents of ``row``.

    Raises UserError that names ``location`` (file and row), the field, and what to type.
    """
    refuse_unread(row, location)
    prompt = read_prompt(
        _field(row, keys.prompt, "data.prompt_key", location), keys.prompt, location
    )
    answer: str | list[Message] | None = None
    if keys.response is not None:
        prompt, answer = _with_answer(row, prompt, keys, location)
    if not isinstance(prompt, str):
        _require_prompt(prompt, keys.prompt, location)
    try:
        source = lookup(row, keys.data_source)
    except KeyError:
        source = None
    data_source = default_source if source is None else str(source)
    extra = row.get("extra_info")
    return DataRow(
        prompt=prompt,
        response=answer if isinstance(answer, str) else None,
        turns=answer if isinstance(answer, list) else None,
        ground_truth=_answer(row, keys, location, data_source),
        data_source=data_source,
        extra_info=dict(extra) if isinstance(extra, Mapping) else {},
    )


def _with_answer(
    row: Mapping[str, Any], prompt: str | list[Message], keys: Keys, location: str
) -> tuple[str | list[Message], str | list[Message]]:
    """Prompt and answer of a sample to learn. Without a response field, messages are a whole
    conversation, and their answer begins with the assistant's first turn.
    """
    key = keys.response or ""
    try:
        value = lookup(row, key)
    except KeyError:
        value = None
    if value is not None:
        return prompt, read_answer(value, key, location, prompt=prompt)
    if isinstance(prompt, list):
        roles = [message["role"] for message in prompt]
        if "assistant" in roles:
            first = roles.index("assistant")
            return prompt[:first], prompt[first:]
    value = _field(row, key, "data.response_key", location)
    return prompt, read_answer(value, key, location, prompt=prompt)


def _answer(row: Mapping[str, Any], keys: Keys, location: str, source: str) -> Any:
    if keys.answer is None:
        return None
    key = keys.answer
    try:
        value = lookup(row, key)
    except KeyError:
        key = VERL_ANSWER
        try:
            value = lookup(row, key)
        except KeyError:
            if keys.answer_required:
                raise _missing(row, keys.answer, "data.answer_key", location) from None
            return None
    if isinstance(value, float) and math.isnan(value):
        raise UserError(
            f"{location}: field '{key}' is NaN, which is what tables write for a missing answer; "
            "fill it in or remove the row"
        )
    empty = value is None or (isinstance(value, str) and not value.strip())
    if empty and keys.answer_required:
        raise UserError(
            f"{location}: field '{key}' is empty; every prompt needs a right answer. Remove the row"
        )
    if empty or not keys.maths_rule:
        return value
    return rule_truth(value, key, location, rule_or_default(source, keys.rules))


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


def _require_prompt(messages: list[Message], key: str, location: str) -> None:
    """Raise UserError for messages that no answer can follow."""
    if not any(m["content"].strip() for m in messages if m["role"] == "user"):
        raise UserError(
            f"{location}: field '{key}' has no user message with text before the answer; fill it "
            "in or remove the row"
        )
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{location}: field '{key}' ends with an assistant message; a prompt ends where the "
            "answer begins. Move that message to the response field"
        )
