"""How tokens are drawn."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.base.errors import UserError

KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Raises :class:`UserError` for values that make no sense."""

    max_response_length: int
    """Most tokens of a response, the end token among them."""
    temperature: float = 1.0
    """Divides the logits. 0: greedy."""
    top_p: float = 1.0
    """Draw from the smallest set of likeliest tokens that holds this probability. 1: all."""
    top_k: int = -1
    """Draw from so many likeliest tokens. -1 or 0: all."""
    do_sample: bool = True
    """False: take the likeliest token."""

    def __post_init__(self) -> None:
        for name, ok, wanted in (
            ("response_length", self.max_response_length >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "-1 (all tokens) or more"),
        ):
            if not ok:
                value = (
                    self.max_response_length if name == "response_length" else getattr(self, name)
                )
                raise UserError(f"{KEY}.{name}={value}: must be {wanted}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return not self.do_sample or self.temperature == 0

    @property
    def scale(self) -> float:
        """The temperature of reported log-probs: 1 where the temperature is 0."""
        return self.temperature or 1.0
