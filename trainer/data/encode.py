"""From text to tokens: chat template, limits, and the checks that a sample has to pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.data.example import Example
from trainer.data.fields import DataRow, Message
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
        self._tokenizer = tokenizer
        self._settings = settings
        self._template = read_template(settings.chat_template)
        self._vocabulary = len(tokenizer) if settings.vocabulary is None else settings.vocabulary
        if self._template is None and not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "the model's tokenizer has no chat template; set data.chat_template to a Jinja "
                "text or file, such as "
                '"{% for m in messages %}{{ m.content }}{% endfor %}" for plain text'
            )

    def prompt_ids(self, prompt: str | list[Message], location: str) -> list[int]:
        """Tokens of a prompt, ready for the answer to follow; not yet truncated."""
        messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        )
        if isinstance(prompt, str) and self._settings.system_prompt is not None:
            messages = [{"role": "system", "content": self._settings.system_prompt}, *messages]
        try:
            text = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                add_generation_prompt=True,
                tokenize=False,
                **self._settings.template_kwargs,
            )
        except Exception as e:  # Jinja runs the template's own code, which may raise anything
            raise UserError(f"{location}: the chat template failed: {type(e).__name__}: {e}") from e
        return self._tokens(text)

    def prompt_fits(self, sample: DataRow, location: str) -> bool:
        """Whether the prompt keeps to ``data.max_prompt_length``."""
        return len(self.prompt_ids(sample.prompt, location)) <= self._settings.max_prompt_length

    def encode(self, sample: DataRow, *, index: int, file: str, row: int) -> Example:
        """The sample's tokens, cut and checked. Raises UserError naming file, row, field, and what
        to type.
        """
        location = f"{file}, row {row}"
        settings = self._settings
        prompt = self.prompt_ids(sample.prompt, location)
        if len(prompt) > settings.max_prompt_length:
            if settings.truncation == "error":
                raise UserError(
                    f"{location}: the prompt has {len(prompt)} tokens, data.max_prompt_length is "
                    f"{settings.max_prompt_length}. Type data.max_prompt_length={len(prompt)}, "
                    "data.filter_overlong_prompts=True to leave such prompts out, or "
                    "data.truncation=left|right|middle to cut them"
                )
            prompt = truncate(prompt, settings.max_prompt_length, settings.truncation)
        response = None if sample.response is None else self._response(sample.response, location)
        example = Example(
            prompt_ids=prompt,
            response_ids=response,
            ground_truth=sample.ground_truth,
            data_source=sample.data_source,
            index=index,
            file=file,
            row=row,
            extra_info=sample.extra_info,
        )
        require_valid_tokens(example, self._vocabulary)
        return example

    def _response(self, text: str, location: str) -> list[int]:
        limit = self._settings.max_response_length
        ids = [*self._tokens(text), int(self._tokenizer.eos_token_id)]
        if len(ids) > limit and self._settings.truncation == "error":
            raise UserError(
                f"{location}: the response has {len(ids)} tokens with its end token, "
                f"data.max_response_length is {limit}. Type "
                f"data.max_response_length={len(ids)}, or data.truncation=right to cut it"
            )
        return truncate(ids, limit, "right")

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


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


def read_template(value: str | None) -> str | None:
    """``data.chat_template``: the text itself, or that of the file it names.

    Raises UserError for neither.
    """
    if value is None or "{" in value or "\n" in value:
        return value
    try:
        return Path(value).expanduser().read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(
            f"data.chat_template: {value} is neither a Jinja text nor a readable file "
            f"({e.strerror})"
        ) from e
