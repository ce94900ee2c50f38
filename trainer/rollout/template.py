"""The tokens that a chat template puts between two turns of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.base.errors import UserError

_FIRST_TURNS = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
_PROBE = "=42="
ROLES = ("tool", "user")
"""Roles of an answer; the first that the template renders is used."""


class ObservationTokens:
    """Renders an agent's answer as the chat template would, after a turn that ended with the end
    token, and opens the next turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        max_length: int,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """``max_length``: of an answer, tokens. ``template`` replaces the tokenizer's own, and
        ``kwargs`` are its variables.

        Raises UserError when the template doesn't append turns to earlier ones, so that the tokens
        between them are unknown.
        """
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._template_options = {"chat_template": template, **(kwargs or {})}
        self._role = next((role for role in ROLES if self._renders(role)), None)
        if self._role is None:
            raise UserError(
                "actor_rollout_ref.rollout.agent: the model's chat template knows no turn of a "
                "tool or a user behind "
                "the assistant's; set data.chat_template to one that does, or "
                "actor_rollout_ref.rollout.agent.name=null"
            )

    def ids(self, text: str) -> list[int]:
        """Token ids of ``text`` as an answer, cut to the longest length, and of the opening of the
        model's next turn.
        """
        content: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(content) > self._max_length:
            text = self._tokenizer.decode(content[: self._max_length], skip_special_tokens=True)
        between = self._between(self._role or ROLES[0], text)
        ids: list[int] = self._tokenizer(between, add_special_tokens=False)["input_ids"]
        return ids

    def _between(self, role: str, text: str) -> str:
        """The text between the end token of a turn and the first token of the next one."""
        before = self._render(_FIRST_TURNS, open_next=False)
        answer = {"role": role, "content": text}
        after = self._render([*_FIRST_TURNS, answer], open_next=True)
        end = str(self._tokenizer.eos_token)
        if not after.startswith(before) or end not in before:
            raise ValueError("the template changes earlier turns, or closes none")
        return before[before.rindex(end) + len(end) :] + after[len(before) :]

    def _renders(self, role: str) -> bool:
        try:
            return _PROBE in self._between(role, _PROBE)
        except Exception:  # Jinja runs the template's own code, which may raise anything
            return False

    def _render(self, messages: list[dict[str, str]], *, open_next: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=open_next, tokenize=False, **self._template_options
        )
        return text
