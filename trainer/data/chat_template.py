"""A chat template as text and tokens: prompts, and what stands between two turns of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.base.errors import UserError
from trainer.base.home import expanded
from trainer.base.json_files import read_regular
from trainer.config.user_files import is_template
from trainer.data.messages import Message
from trainer.data.rendering import Renderer, TemplateError, TemplateFailed

PROBE = "=plimsoll=42="
"""A content by which the parts of a rendered text are found."""
_QUESTION: Message = {"role": "user", "content": "?"}


class ChatTemplate:
    """The chat template of ``data.chat_template``, or the tokenizer's own.

    Turns are appended to the ones before as tokens and never rendered again: templates such as
    Qwen3's change earlier turns.
    """

    def __init__(
        self,
        tokenizer: Any,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """``template``: the Jinja text that replaces the tokenizer's own. ``variables``: those of
        ``data.apply_chat_template_kwargs``.

        Raises UserError when neither the setting nor the tokenizer has a template.
        """
        self._tokenizer = tokenizer
        self._renderer = Renderer(tokenizer)
        self._options = {**(variables or {}), "chat_template": template}
        own = getattr(tokenizer, "chat_template", None)
        if template is None and not own:
            raise UserError(
                "the model's tokenizer has no chat template; set data.chat_template to a Jinja "
                f"text or file, such as {_plain_template(tokenizer)} for plain text"
            )
        self.marks_generation = "{% generation" in str(template or own).replace("{%-", "{%")
        """Whether the template marks what the assistant wrote."""
        self._marks: frozenset[str] | None = None
        self._wrapper = ("", "")

    def render(self, messages: Sequence[Message], *, open_next: bool) -> str:
        """``messages`` as text; ``open_next`` adds the header of the assistant's next turn.

        Raises TemplateFailed when the template's own code raises, and UserError when it takes too
        much time or memory.
        """
        text: str = self._renderer.render(
            messages, add_generation_prompt=open_next, tokenize=False, **self._options
        )
        return text

    def ids(self, text: str) -> list[int]:
        """Token ids of a rendered text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def turn_ids(self, content: str) -> list[int]:
        """Token ids of a turn of the model: ``content``, closed by exactly one end token."""
        end = getattr(self._tokenizer, "eos_token", None)
        text = content
        while end and text.rstrip().endswith(end):
            text = text.rstrip().removesuffix(end)
        return [*self.ids(text), int(self._tokenizer.eos_token_id)]

    def marked_ids(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Token ids of ``messages``, and whether the template marks each as the assistant's."""
        ids, mask = self._renderer.render(
            messages,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self._options,
        )
        return ids, mask

    def between(self, messages: Sequence[Message]) -> str:
        """The text from behind the end token of a turn of the model, over ``messages`` of others,
        to where the model's next turn begins.

        Raises TemplateError when the template doesn't show where a turn ends.
        """
        turns = [_QUESTION, {"role": "assistant", "content": PROBE}, *messages]
        text = self.render(turns, open_next=True)
        if PROBE not in text:
            raise TemplateError("leaves out earlier turns of the assistant")
        rest = text[text.index(PROBE) + len(PROBE) :]
        end = str(self._tokenizer.eos_token)
        closing, found, after = rest.partition(end)
        if not found or closing.strip():
            raise TemplateError(f"doesn't close the assistant's turn with the end token {end}")
        return after

    def rendered_turn(
        self, earlier: Sequence[Message], turn: Message, results: Sequence[Message]
    ) -> str:
        """The text of ``turn``, the assistant's behind ``earlier`` messages, up to its end token.
        ``results``: of the tools that it calls, since some templates write a last turn otherwise.

        Raises TemplateError when the template doesn't write it behind its own header.
        """
        whole = self.render([*earlier, turn, *results], open_next=False)
        opening = self.render(earlier, open_next=True)
        # A prompt may end with more than a turn's header: with an empty thought, for instance.
        probe = {"role": "assistant", "content": PROBE}
        header = self.render([*earlier, probe, *results], open_next=False).partition(PROBE)[0]
        extra = opening.removeprefix(header).split()
        for start in (opening, header):
            text, end, _ = whole.removeprefix(start).partition(str(self._tokenizer.eos_token))
            twice = start != opening and extra and text.startswith(extra[0])
            if whole.startswith(start) and end and not twice:
                return text
        raise TemplateError("doesn't write this turn behind its header and close it")

    def tail(self, messages: Sequence[Message], text: str) -> str:
        """The end of the rendered ``text`` of a prompt behind its last message's content: its
        closing and the header of the assistant's turn.
        """
        last = messages[-1]
        marked = [*messages[:-1], {**last, "content": last["content"] + PROBE}]
        tail = self.render(marked, open_next=True).rpartition(PROBE)[2]
        return tail if text.endswith(tail) else ""

    def missing_bos(self) -> str | None:
        """The token with which the tokenizer begins every text, if the template does not."""
        bos = getattr(self._tokenizer, "bos_token", None)
        if not bos or not _begins_with_bos(self._tokenizer):
            return None
        text = self.render([_QUESTION], open_next=True)
        return None if text.startswith(bos) else str(bos)

    def is_templated(self, text: str) -> bool:
        """Whether ``text`` was put into a chat template before: it begins with one of the special
        tokens that the template writes, or is wrapped as the template wraps a prompt.
        """
        if self._marks is None:
            self._marks = self._find_marks()
        stripped = text.strip()
        if any(stripped.startswith(mark) for mark in self._marks):
            return True
        opening, closing = self._wrapper
        wrapped = stripped.startswith(opening) and stripped.endswith(closing)
        return bool(opening and closing and wrapped)

    def _find_marks(self) -> frozenset[str]:
        try:
            text = self.render([{"role": "user", "content": PROBE}], open_next=True)
        except TemplateFailed:  # a prompt's own error tells more
            return frozenset()
        opening, _, closing = text.partition(PROBE)
        self._wrapper = (opening.strip(), closing.strip())
        tokens = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in tokens if token.special}
        return frozenset(token for token in special if token and token in opening)


def read_template(value: str | None) -> str | None:
    """``data.chat_template``: the text itself, or that of the file it names.

    Raises UserError for neither.
    """
    if value is None or is_template(value):
        return value
    try:
        return read_regular(expanded(value)).decode()
    except UnicodeDecodeError as e:
        raise UserError(f"data.chat_template: {value} is no text in UTF-8 ({e.reason})") from e
    except OSError as e:
        raise UserError(
            f"data.chat_template: {value} is neither a Jinja text nor a readable file "
            f"({e.strerror})"
        ) from e


def _plain_template(tokenizer: Any) -> str:
    """A template for plain text, with the token that the tokenizer itself puts before a text."""
    start = "{{ bos_token }}" if _begins_with_bos(tokenizer) else ""
    return f'"{start}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"'


def _begins_with_bos(tokenizer: Any) -> bool:
    bos = getattr(tokenizer, "bos_token_id", None)
    return bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
