"""Chat messages as rows hold them: lists, JSON text, content in parts; text alone is supported."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.base.errors import UserError

Message = dict[str, Any]
MEDIA_FIELDS = ("images", "image", "videos", "video", "audios", "audio")
"""Fields in which verl, TRL and others keep what a prompt shows besides its text."""
TOOLS_FIELD = "tools"
"""Field in which TRL and others describe tools to the chat template."""
_TEXT_ALONE = "and only text can be trained on: images, video and audio aren't supported"
PLACEHOLDERS = ("<image>", "<video>", "<audio>")
"""What stands in a text for such an image, video or recording."""


def refuse_unread(row: Mapping[str, Any], location: str) -> None:
    """Raise UserError for a row whose prompt has more to it than the text that is read."""
    for name in (*MEDIA_FIELDS, TOOLS_FIELD):
        value = row.get(name)
        if value is None or value is False or value in ("", [], {}, "[]"):
            continue
        if name == TOOLS_FIELD:
            raise UserError(
                f"{location}: field '{name}' is not empty, and is not handed to the chat template: "
                "write what the tools are into the system message, and remove the field"
            )
        raise UserError(
            f"{location}: field '{name}' is not empty, {_TEXT_ALONE}. Remove the row, or the "
            "field if the text means the same without it"
        )


def read_prompt(value: Any, key: str, location: str) -> str | list[Message]:
    """The prompt in field ``key``: a text, or messages, which may be given as JSON text.

    Raises UserError, which names location and field, for anything else.
    """
    if isinstance(value, str):
        parsed = _json_messages(value, key, location)
        if parsed is None:
            refuse_placeholders(value, f"field '{key}'", location)
            return read_text(value, key, location)
        value = parsed
    if not isinstance(value, list):
        raise UserError(
            f"{location}: field '{key}' must be a text or a list of chat messages, found "
            f"{kind(value)}"
        )
    return read_messages(value, key, location)


def read_answer(
    value: Any, key: str, location: str, *, prompt: str | list[Message]
) -> str | list[Message]:
    """The answer in field ``key``: a text, or messages that begin with the assistant's. Data sets
    of preferences repeat the ``prompt`` before it, which is passed over.

    Raises UserError, which names location and field, for anything else.
    """
    if isinstance(value, str):
        parsed = _json_messages(value, key, location)
        if parsed is None:
            return read_text(value, key, location)
        value = parsed
    if not isinstance(value, list):
        return read_text(value, key, location)
    messages = read_messages(value, key, location)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if len(messages) > len(before) and messages[: len(before)] == before:
        messages = messages[len(before) :]
    if messages[0]["role"] != "assistant":
        raise UserError(
            f"{location}: field '{key}' begins with a message of the {messages[0]['role']}; an "
            "answer begins with the assistant's. Move what comes before it to the prompt"
        )
    return messages


def read_text(value: Any, key: str, location: str) -> str:
    """A text that is not empty. Raises UserError for anything else."""
    if not isinstance(value, str):
        raise UserError(f"{location}: field '{key}' must be a text, found {kind(value)}")
    if not value.strip():
        raise UserError(f"{location}: field '{key}' is empty; fill it in or remove the row")
    return value


def read_messages(value: Sequence[Any], key: str, location: str) -> list[Message]:
    """Messages with ``role`` and a text as ``content``; other entries are kept for the template.

    Raises UserError that names location, field and message.
    """
    if not value:
        raise UserError(f"{location}: field '{key}' is empty; fill it in or remove the row")
    return [
        _message(message, f"field '{key}', message {k}", location)
        for k, message in enumerate(value)
    ]


def refuse_placeholders(text: str, name: str, location: str) -> None:
    """Raise UserError for a text, called ``name``, in which an image or the like is missing."""
    for placeholder in PLACEHOLDERS:
        if placeholder in text:
            raise UserError(
                f"{location}: {name} has {placeholder} in its text, {_TEXT_ALONE}. Remove "
                "the row, or write the word otherwise if it is meant as text"
            )


def kind(value: Any) -> str:
    """What ``value`` is, for messages."""
    if isinstance(value, Mapping):
        return f"an object with {', '.join(map(str, value)) or 'no fields'}"
    if value is None:
        return "nothing (null)"
    return f"{type(value).__name__} {str(value)[:40]!r}"


def _message(message: Any, name: str, location: str) -> Message:
    if not isinstance(message, Mapping) or "role" not in message:
        hint = ""
        if isinstance(message, Mapping) and {"from", "value"} <= set(message):
            hint = "; write 'from' as 'role' (human: user, gpt: assistant), 'value' as 'content'"
        raise UserError(
            f"{location}: {name} must have 'role' and 'content', found {kind(message)}{hint}"
        )
    # Arrow fills absent keys with nulls.
    clean = {field: part for field, part in message.items() if part is not None}
    role = clean.get("role")
    if not isinstance(role, str):
        raise UserError(f"{location}: {name}: the role must be a text, found {kind(role)}")
    calls_a_tool = role == "assistant" and bool(clean.get("tool_calls"))
    if "content" not in clean and not calls_a_tool:
        raise UserError(f"{location}: {name} must have 'role' and 'content', found {kind(message)}")
    clean["content"] = _text_of(clean.get("content", ""), name, location)
    if role != "assistant":
        refuse_placeholders(clean["content"], name, location)
    return clean


def _text_of(content: Any, name: str, location: str) -> str:
    """The text of a content, which may be a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{location}: {name}: content must be a text, found {kind(content)}")
    texts = []
    for part in content:
        text = part
        if isinstance(part, Mapping):
            if part.get("type", "text") != "text":
                raise UserError(
                    f"{location}: {name} has a part of type '{part['type']}', {_TEXT_ALONE}. "
                    "Remove the row"
                )
            text = part.get("text")
        if not isinstance(text, str):
            raise UserError(f"{location}: {name}: a part must be a text, found {kind(part)}")
        texts.append(text)
    return "".join(texts)


def _json_messages(text: str, key: str, location: str) -> list[Any] | None:
    """The list in a text that is JSON of chat messages; None for any other text."""
    start = text.lstrip()
    if not start.startswith(("[", "{")) or not ("role" in text or "from" in text):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        if start.startswith(("[{'role'", "[{'content'", "{'role'", "{'content'")):
            raise UserError(
                f"{location}: field '{key}' is the text of a Python list of messages; store the "
                "list itself, or its JSON (json.dumps)"
            ) from None
        return None
    messages = [value] if isinstance(value, dict) else value
    known = ({"role", "content"}, {"from", "value"})
    if not messages or not all(
        isinstance(m, dict) and any(names <= set(m) for names in known) for m in messages
    ):
        return None
    return list(messages)
