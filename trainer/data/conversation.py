"""Conversations to learn from: token ids with the assistant's turns marked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from trainer.data.chat_template import ChatTemplate
from trainer.data.messages import Message
from trainer.data.rendering import TemplateError

WEIGHT = "weight"
"""Entry of a message of the assistant that is 0 when it is not to be learnt, as OpenAI has it."""
_PLAIN = {"role", "content", "name", WEIGHT}
"""Entries of a message whose content is all that the model writes."""


class Turns(NamedTuple):
    """The answer of a conversation."""

    ids: list[int]
    """Token ids from behind the prompt to the last end token."""
    mask: list[bool]
    """True for what the assistant writes, end tokens included; one per id."""


def answer_turns(
    template: ChatTemplate,
    prompt: Sequence[Message],
    prompt_ids: Sequence[int],
    turns: Sequence[Message],
) -> Turns:
    """``turns``, which begin with the assistant's, as they follow ``prompt`` (``prompt_ids``).

    A template that marks the assistant's words (``{% generation %}``) decides which tokens are
    trained. Otherwise turns are appended as a rollout would: the content's tokens and an end token,
    then what the template writes between. Messages behind the assistant's last turn are left out,
    and one with ``weight`` 0 is not trained.

    Raises TemplateError for a template that can't do this.
    """
    last = max(k for k, message in enumerate(turns) if message["role"] == "assistant")
    turns = turns[: last + 1]
    if template.marks_generation:
        return _marked(template, [*prompt, *turns], prompt_ids)
    ids: list[int] = []
    mask: list[bool] = []
    others: list[Message] = []
    for k, message in enumerate(turns):
        if message["role"] != "assistant":
            others.append(message)
            continue
        if k > 0:
            between = template.ids(template.between(others))
            ids += between
            mask += [False] * len(between)
            others = []
        results = takewhile(lambda later: later["role"] == "tool", turns[k + 1 :])
        turn = _turn_ids(template, message, [*prompt, *turns[:k]], list(results))
        ids += turn
        mask += [_is_trained(message)] * len(turn)
    if not any(mask):
        raise TemplateError("is left nothing to learn: every turn has weight 0")
    return Turns(ids, mask)


def _is_trained(message: Message) -> bool:
    return bool(message.get(WEIGHT, 1) != 0)


def _turn_ids(
    template: ChatTemplate,
    message: Message,
    earlier: Sequence[Message],
    results: Sequence[Message],
) -> list[int]:
    """The tokens of an assistant's message; one with tool calls or thoughts of its own is written
    by the template.
    """
    if set(message) <= _PLAIN:
        return template.turn_ids(message["content"])
    return template.turn_ids(template.rendered_turn(earlier, message, results))


def _marked(
    template: ChatTemplate, messages: Sequence[Message], prompt_ids: Sequence[int]
) -> Turns:
    if not all(map(_is_trained, messages)):
        raise TemplateError("marks what is trained itself, so that a weight of 0 can't be kept")
    ids, mask = template.marked_ids(messages)
    start = len(prompt_ids)
    if ids[:start] != list(prompt_ids):
        raise TemplateError("changes the prompt when an answer follows")
    ids = ids[start:]
    mask = mask[start:]
    if not any(mask):
        raise TemplateError("marks nothing as the assistant's ({% generation %})")
    end = len(mask) - mask[::-1].index(True)
    return Turns(ids[:end], mask[:end])
