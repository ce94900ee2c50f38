"""What a reward is asked and what it answers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One answer to judge."""

    data_source: str
    solution_text: str
    """The response without special tokens."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    """Index of the prompt in the data set, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """One judgement."""

    value: float
    """The reward; finite."""
    extra: dict[str, float] = field(default_factory=dict)
    """Further numbers a reward function returned beside ``score``; they become metrics."""
    unjudged: bool = False
    """The maths rule could not decide in time; ``value`` is 0."""


class Reward(Protocol):
    """verl's signature; called by keyword."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> Any:
        """A number, or a mapping with ``score``."""
        ...


def to_score(returned: Any) -> Score:
    """What a reward function returned, as a Score. Raises ValueError worded to follow "the function
    returned".
    """
    extra: dict[str, float] = {}
    value = returned
    if isinstance(returned, Mapping):
        if "score" not in returned:
            raise ValueError(
                f"a dict without 'score' (it has {', '.join(map(str, returned)) or 'nothing'})"
            )
        value = returned["score"]
        extra = {
            str(k): number
            for k, v in returned.items()
            if k != "score" and (number := _number(v)) is not None
        }
    number = _number(value)
    if number is None:
        raise ValueError(f"{type(value).__name__} {str(value)[:60]!r}, not a number")
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    return Score(value=number, extra=extra)


def _number(value: Any) -> float | None:
    """A Python, numpy or single-element tensor number, or None."""
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, str | bytes) or not hasattr(value, "item"):
        return None
    try:
        item = value.item()  # a numpy or torch scalar
    except (ValueError, RuntimeError, TypeError):
        return None
    return float(item) if isinstance(item, Real) else None
