"""From text to tokens: chat template, limits, and the checks that a sample has to pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.base.errors import UserError
from trainer.data.chat_template import ChatTemplate, read_template
from trainer.data.conversation import Turns, answer_turns
from trainer.data.example import Example
from trainer.data.fields import DataRow
from trainer.data.messages import Message
from trainer.data.rendering import TemplateError
from trainer.data.truncate import Truncation, truncate


@dataclass(frozen=True, kw_only=True)
class EncodeSettings:
    """Limits and template, with the meanings of ``data.*``. Lengths are in tokens."""

    max_prompt_length: int
    max_response_length: int
    truncation: Truncation = "error"
    system_prompt: str | None = None
    chat_template: str | None = None
    """Jinja text, or the path of a file that holds it. None: the tokenizer's own."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    vocabulary: int | None = None
    """Size of the model's vocabulary; None: the tokenizer's."""


class Encoder:
    """Tokenizes samples. ``tokenizer`` is a Hugging Face tokenizer with an end token.

    A response is tokenized separately and closed with the end token. One that is too long is an
    error under ``truncation=error``; otherwise its tail is cut with the end token, so that a cut
    answer doesn't teach the model to stop.

    Raises UserError when neither the settings nor the tokenizer have a chat template.
    """

    def __init__(self, tokenizer: Any, settings: EncodeSettings) -> None:
        self._settings = settings
        self._template = ChatTemplate(
            tokenizer, read_template(settings.chat_template), settings.template_kwargs
        )
        self._vocabulary = len(tokenizer) if settings.vocabulary is None else settings.vocabulary

    def prompt_ids(self, prompt: str | list[Message], location: str) -> list[int]:
        """Tokens of a prompt, ready for the answer to follow; not yet truncated."""
        return self._template.ids(self._render(self._messages(prompt, location), location))

    def prompt_fits(self, sample: DataRow, location: str) -> bool:
        """Whether the prompt keeps to ``data.max_prompt_length``."""
        return len(self.prompt_ids(sample.prompt, location)) <= self._settings.max_prompt_length

    def encode(self, sample: DataRow, *, index: int, file: str, row: int) -> Example:
        """The sample's tokens, cut and checked. Raises UserError naming file, row, field, and what
        to type.
        """
        location = f"{file}, row {row}"
        messages = self._messages(sample.prompt, location)
        text = self._render(messages, location)
        whole_prompt = self._template.ids(text)
        prompt = self._cut_prompt(whole_prompt, messages, text, location)
        answer = self._answer(sample, messages, whole_prompt, location)
        response = None if answer is None else self._cut_response(answer.ids, location)
        example = Example(
            prompt_ids=prompt,
            response_ids=response,
            ground_truth=sample.ground_truth,
            data_source=sample.data_source,
            index=index,
            file=file,
            row=row,
            extra_info=sample.extra_info,
            response_mask=_mask(answer, response),
            cut_prompt=len(prompt) < len(whole_prompt),
            cut_response=answer is not None and len(response or []) < len(answer.ids),
        )
        require_valid_tokens(example, self._vocabulary)
        return example

    def _messages(self, prompt: str | list[Message], location: str) -> list[Message]:
        """The prompt as messages, with ``data.system_prompt``. Raises UserError for texts that went
        through a chat template before.
        """
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for message in messages:
            if message["role"] != "assistant" and self._template.is_templated(message["content"]):
                raise UserError(
                    f"{location}: the prompt begins as the chat template writes it "
                    f"({message['content'].strip()[:40]!r}), so it would be templated twice. Give "
                    "the bare text or a list of messages; data.chat_template="
                    "'{% for m in messages %}{{ m.content }}{% endfor %}' takes texts as they are"
                )
        system = self._settings.system_prompt
        if system is None:
            return messages
        if messages[0]["role"] != "system":
            return [{"role": "system", "content": system}, *messages]
        own = messages[0]["content"]
        both = own if system in own else f"{own}\n\n{system}"
        return [{**messages[0], "content": both}, *messages[1:]]

    def _render(self, messages: list[Message], location: str) -> str:
        try:
            return self._template.render(messages, open_next=True)
        except TemplateError as e:
            raise UserError(f"{location}: the chat template {e}") from e
        except UserError as e:
            raise UserError(f"{location}: {e}") from e

    def _cut_prompt(
        self, ids: list[int], messages: list[Message], text: str, location: str
    ) -> list[int]:
        """At most ``data.max_prompt_length`` of the prompt's tokens. What the template writes
        behind the last message is always kept: the model would not know that it is its turn.
        """
        limit = self._settings.max_prompt_length
        side = self._settings.truncation
        if len(ids) <= limit:
            return ids
        if side == "error":
            raise UserError(
                f"{location}: the prompt has {len(ids)} tokens, data.max_prompt_length is "
                f"{limit}. Type data.max_prompt_length={len(ids)}, "
                "data.filter_overlong_prompts=True to leave such prompts out, or "
                "data.truncation=left|right|middle to cut them"
            )
        tail_text = self._template.tail(messages, text)
        tail = self._template.ids(tail_text)
        if len(tail) >= limit:
            raise UserError(
                f"{location}: the chat template closes a prompt with {len(tail)} tokens, which "
                f"leaves no room in data.max_prompt_length={limit}; raise it"
            )
        if side == "left" or (side == "middle" and limit - limit // 2 >= len(tail)):
            return truncate(ids, limit, side)
        body = self._template.ids(text.removesuffix(tail_text))
        return [*truncate(body, limit - len(tail), side), *tail]

    def _answer(
        self, sample: DataRow, messages: list[Message], prompt_ids: list[int], location: str
    ) -> Turns | None:
        """The answer to learn, not yet truncated; None without one."""
        if sample.response is not None:
            ids = self._template.turn_ids(sample.response)
            return Turns(ids, [True] * len(ids))
        if sample.turns is None:
            return None
        try:
            return answer_turns(self._template, messages, prompt_ids, sample.turns)
        except TemplateError as e:
            raise UserError(
                f"{location}: the conversation can't be built, since the chat template {e}. "
                "Set data.chat_template to one that appends turns"
            ) from e

    def _cut_response(self, ids: list[int], location: str) -> list[int]:
        limit = self._settings.max_response_length
        if len(ids) > limit and self._settings.truncation == "error":
            raise UserError(
                f"{location}: the response has {len(ids)} tokens with its end token, "
                f"data.max_response_length is {limit}. Type "
                f"data.max_response_length={len(ids)}, or data.truncation=right to cut it"
            )
        return truncate(ids, limit, "right")


def _mask(answer: Turns | None, response: list[int] | None) -> list[bool] | None:
    """Which tokens of ``response`` are trained; None: all."""
    if answer is None or response is None or all(answer.mask):
        return None
    return answer.mask[: len(response)]


def require_valid_tokens(example: Example, vocabulary: int) -> None:
    """Raise UserError, naming file, row and field, when a sample's tokens can't be fed to the
    model.
    """
    for name, ids in (("prompt", example.prompt_ids), ("response", example.response_ids)):
        if ids is None:
            continue
        if not ids:
            raise UserError(
                f"{example.location}: the {name} has no tokens; fill the field in or remove the row"
            )
        if min(ids) < 0 or max(ids) >= vocabulary:
            bad = next(i for i in ids if not 0 <= i < vocabulary)
            raise UserError(
                f"{example.location}: the {name} holds token id {bad}, past the model's vocabulary "
                f"of {vocabulary}. Model and tokenizer don't fit: use the tokenizer of "
                "actor_rollout_ref.model.path"
            )
