"""The tokens that a chat template puts between two turns of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.base.errors import UserError

_ASKED = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
ROLES = ("tool", "user")
"""Whom an answer comes from: the first that the template knows."""


class ObservationTokens:
    """Renders an answer as the template would behind a turn that ended with the end token, and
    opens the next turn.

    Raises UserError when the template doesn't render turns one behind the other: then nobody can
    tell which tokens stand between them.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        longest: int,
        template: str | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """``template``, ``kwargs``: instead of the tokenizer's own, and what to render it with."""
        self._tokenizer, self._longest = tokenizer, longest
        self._how = {"chat_template": template, **(kwargs or {})}
        self._role = next((role for role in ROLES if self._renders(role)), None)
        if self._role is None:
            raise UserError(
                "actor_rollout_ref.rollout.agent: the model's chat template knows no turn of a "
                "tool or a user behind "
                "the assistant's; set data.chat_template to one that does, or "
                "actor_rollout_ref.rollout.agent.name=null"
            )

    def ids(self, text: str) -> list[int]:
        """Tokens of ``text`` as an answer, cut to the longest, and of the opening of the model's
        next turn.
        """
        content: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(content) > self._longest:
            text = self._tokenizer.decode(content[: self._longest], skip_special_tokens=True)
        between = self._between(self._role or ROLES[0], text)
        ids: list[int] = self._tokenizer(between, add_special_tokens=False)["input_ids"]
        return ids

    def _between(self, role: str, text: str) -> str:
        said = self._render(_ASKED, opened=False)
        whole = self._render([*_ASKED, {"role": role, "content": text}], opened=True)
        end = str(self._tokenizer.eos_token)
        if not whole.startswith(said) or end not in said:
            raise ValueError("the template changes earlier turns, or closes none")
        return said[said.rindex(end) + len(end) :] + whole[len(said) :]

    def _renders(self, role: str) -> bool:
        try:
            return "=42=" in self._between(role, "=42=")
        except Exception:  # Jinja runs the template's own code, which may raise anything
            return False

    def _render(self, messages: list[dict[str, str]], *, opened: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=opened, tokenize=False, **self._how
        )
        return text
