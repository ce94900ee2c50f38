"""A request to score one response, and the score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest float32: rewards are held in that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One response to score."""

    data_source: str
    solution_text: str
    """The response without special tokens."""
    ground_truth: Any
    extra_info: dict[str, Any] = field(default_factory=dict)
    index: int = 0
    """Index of the prompt in the data set, for messages."""
    response_length: int = 0
    """Tokens of the response, those of an agent's tool included."""
    finish_reason: str = "stop"
    """``stop`` by an end token, ``length`` by the limit."""
    turns: tuple[Mapping[str, object], ...] = ()
    """The response as messages: ``{"role": "assistant" or "tool", "content": TEXT}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of one response."""

    value: float
    """The reward; finite in float32."""
    extra: dict[str, float] = field(default_factory=dict)
    """Other numbers that the reward function returned with ``score``; they become metrics."""
    unjudged: bool = False
    """The maths rule did not decide in time; ``value`` is 0."""
    pred: str | None = None
    """The answer that a user's function read from the response (``pred``); None: it gave none."""
    failed: str = ""
    """Why a user's function gave no number for the response; ``value`` is ``reward.on_error``."""


class RewardFunction(Protocol):
    """A reward function with verl's signature; called by keyword."""

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
    ) -> Any:
        """A number, or a mapping with ``score``."""
        ...


def to_score(returned: Any) -> Score:
    """Convert what a reward function returned.

    Raises ValueError with a message that continues "the function returned".
    """
    value = returned
    extra: dict[str, float] = {}
    pred: str | None = None
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "nothing"
            raise ValueError(f"a dict without 'score' (it has {keys})")
        value = returned["score"]
        extra = _numbers(returned)
        extra.pop("score", None)
        if isinstance(returned.get("pred"), str):
            pred = returned["pred"]
    number = _number(value)
    if number is None:
        raise ValueError(f"{type(value).__name__} {str(value)[:60]!r}, not a number")
    if not math.isfinite(number):
        raise ValueError(f"{number}, not a finite number")
    if abs(number) > LARGEST:
        raise ValueError(f"{number:g}, which float32 can't hold (at most {LARGEST:.2g})")
    return Score(value=number, extra=extra, pred=pred)


def _numbers(mapping: Mapping[Any, Any]) -> dict[str, float]:
    """The entries that are numbers."""
    numbers: dict[str, float] = {}
    for key, value in mapping.items():
        number = _number(value)
        if number is not None:
            numbers[str(key)] = number
    return numbers


def _number(value: Any) -> float | None:
    """A number of Python or numpy, or a one-element tensor, as a float; None for anything else."""
    if isinstance(value, Real):
        return _float(value)
    if isinstance(value, str | bytes) or not hasattr(value, "item"):
        return None
    try:
        item = value.item()
    except (ValueError, RuntimeError, TypeError):
        return None
    return _float(item) if isinstance(item, Real) else None


def _float(value: Real) -> float:
    """The value as a float; infinity for an integer that no float holds."""
    try:
        return float(value)
    except OverflowError:
        return math.inf
