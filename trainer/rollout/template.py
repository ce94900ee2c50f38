"""The tokens that a chat template puts between two turns of the model."""

from __future__ import annotations

from typing import Any

from trainer.base.errors import UserError
from trainer.data.chat_template import ChatTemplate
from trainer.data.rendering import TemplateError, TemplateFailed

_PROBE = "=observation=42="
ROLES = ("tool", "user")
"""Roles of an answer; the first that the template renders is used."""


class ObservationTokens:
    """Renders an agent's answer as the chat template would, after a turn that ended with the end
    token, and opens the next turn. Earlier turns keep the tokens that they have.
    """

    def __init__(self, tokenizer: Any, template: ChatTemplate, *, max_length: int) -> None:
        """``max_length``: of an answer, tokens.

        Raises UserError when the template has no turn for an answer, or doesn't show where the
        model's turn ends.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._max_length = max_length
        self._role = self._find_role()

    def ids(self, text: str) -> list[int]:
        """Token ids of ``text`` as an answer, cut to the longest length, and of the opening of the
        model's next turn.
        """
        content = self._template.ids(text)
        if len(content) > self._max_length:
            text = self._tokenizer.decode(content[: self._max_length], skip_special_tokens=True)
        return self._template.ids(self._between(self._role, text))

    def _between(self, role: str, text: str) -> str:
        return self._template.between([{"role": role, "content": text}])

    def _find_role(self) -> str:
        """The first role whose answers the template renders."""
        reasons = []
        for role in ROLES:
            try:
                if _PROBE in self._between(role, _PROBE):
                    return role
                reasons.append(f"leaves out a message of role {role}")
            except TemplateFailed as e:
                reasons.append(f"fails on a message of role {role} ({e.reason})")
            except TemplateError as e:
                reasons.append(str(e))
        raise UserError(
            "actor_rollout_ref.rollout.agent: an answer of the agent can't follow a turn of the "
            f"model, since the model's chat template {' and '.join(dict.fromkeys(reasons))}; set "
            "data.chat_template to one that does this, or actor_rollout_ref.rollout.agent.name=null"
        )
