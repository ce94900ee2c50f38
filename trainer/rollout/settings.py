"""Sampling parameters of a generation."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.base.errors import UserError

KEY = "actor_rollout_ref.rollout"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters. Raises UserError for values outside of their range."""

    max_response_length: int
    """Longest response, the end token included, tokens."""
    temperature: float = 1.0
    """Divides the logits. 0: greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens that holds this probability. 1: all."""
    top_k: int = -1
    """Sample from this many likeliest tokens. -1 or 0: all."""
    do_sample: bool = True
    """False: take the likeliest token."""

    def __post_init__(self) -> None:
        length = self.max_response_length
        for name, value, valid, expected in (
            ("response_length", length, length >= 1, "at least 1"),
            ("temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= -1, "-1 (all tokens) or more"),
        ):
            if not valid:
                raise UserError(f"{KEY}.{name}={value}: must be {expected}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken instead of a random one."""
        return not self.do_sample or self.temperature == 0

    @property
    def scale(self) -> float:
        """The temperature of the reported log-probs: 1 when the temperature is 0."""
        return self.temperature or 1.0
