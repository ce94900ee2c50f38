"""Length penalties: pure functions of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.config.schema import Config
from trainer.rewards.types import Score


def length_penalty(length: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-factor, 0].

    0 up to ``max_length - buffer`` tokens, then linear to ``-factor`` at ``max_length`` and beyond.
    Raises ValueError for a ``buffer`` outside of 1 to ``max_length``.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be from 1 to max_length={max_length} tokens, not {buffer}")
    over = length - (max_length - buffer)
    return -factor * min(1.0, max(0.0, over / buffer))


@dataclass(frozen=True, kw_only=True)
class OverlongPenalty:
    """``length_penalty`` with the settings of ``reward_model.overlong_buffer``."""

    max_length: int
    """Tokens of the longest response."""
    buffer: int
    """Tokens before ``max_length`` over which the penalty grows."""
    factor: float

    @classmethod
    def from_config(cls, config: Config) -> OverlongPenalty | None:
        """None where ``reward_model.overlong_buffer.enable`` is false."""
        settings = config.reward_model.overlong_buffer
        if not settings.enable:
            return None
        return cls(
            max_length=config.data.max_response_length,
            buffer=settings.len,
            factor=settings.penalty_factor,
        )

    def applied(self, score: Score, response_length: int) -> Score:
        """``score`` with the penalty for ``response_length`` tokens added, which is also among its
        numbers for the metrics, with verl's name.
        """
        penalty = length_penalty(
            response_length, max_length=self.max_length, buffer=self.buffer, factor=self.factor
        )
        return replace(
            score,
            value=score.value + penalty,
            extra={**score.extra, "overlong_reward": penalty, "overlong": float(penalty < 0)},
        )
