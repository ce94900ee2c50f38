"""Which prompts a step asks for: new ones from the loader, and those that an earlier step began or
left over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainer.data import Example
from trainer.rollout import Sample

MAX_KNOWN_LENGTHS = 1_000_000
"""Prompts whose last response length is kept, for the order in which groups are begun."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A prompt asked for. (``step``, ``number``) name its random numbers; ``step`` 0: not asked for
    yet.
    """

    example: Example
    step: int = 0
    number: int = 0
    begun: tuple[Sample, ...] = ()
    """What an earlier step drew of its responses; nothing, or one for each."""


class Examples(Protocol):
    """Samples by number."""

    def __getitem__(self, index: int) -> Example: ...


class Prompts:
    """The same on every rank.

    A step begins ``over_sampling`` times as many prompts as it needs and gives back those that were
    not finished. They come first in the next step. What was drawn of them is kept while the weights
    that drew it are at most ``max_staleness`` iterations older than those being trained; otherwise
    they are begun anew.
    """

    def __init__(
        self,
        batches: Iterator[list[Example]],
        *,
        over_sampling: float = 1.0,
        max_staleness: int = 0,
    ) -> None:
        self._batches, self._over_sampling, self._max_staleness = (
            batches,
            over_sampling,
            max_staleness,
        )
        self._waiting: list[Ask] = []
        self._lengths: dict[int, float] = {}

    def take(self, want: int, step: int, version: int) -> list[Ask]:
        """The prompts to begin in ``step`` for a batch of ``want``. ``version``: of the weights at
        hand.
        """
        count = math.ceil(want * self._over_sampling - 1e-9)
        while len(self._waiting) < count:
            self._waiting += [Ask(example=e) for e in next(self._batches)]
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        asks: list[Ask] = []
        for ask in taken:
            oldest = min((s.version for s in ask.begun if s.response_ids.numel()), default=version)
            if not ask.step or version - oldest > self._max_staleness:
                ask = Ask(example=ask.example, step=step, number=len(asks))
            asks.append(ask)
        return asks

    def give_back(self, asks: Sequence[Ask]) -> None:
        """Put unfinished ones in front of all others."""
        self._waiting = [*asks, *self._waiting]

    def observe(self, examples: Sequence[Example], lengths: Sequence[float]) -> None:
        """Remember the mean response length of each prompt, in tokens."""
        for example, length in zip(examples, lengths, strict=True):
            if len(self._lengths) < MAX_KNOWN_LENGTHS or example.index in self._lengths:
                self._lengths[example.index] = float(length)

    def long_first(self, numbers: Sequence[int], asks: Sequence[Ask]) -> list[int]:
        """``numbers`` (places in ``asks``) in the order to begin them: those begun already, unknown
        ones, then the longest of last time: what takes long is not left for the end.
        """

        def key(number: int) -> tuple[bool, float]:
            ask = asks[number]
            return not ask.begun, -self._lengths.get(ask.example.index, math.inf)

        return sorted(numbers, key=key)

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors for a checkpoint."""
        return {
            "waiting": [
                {
                    "index": ask.example.index,
                    "step": ask.step,
                    "number": ask.number,
                    "begun": [sample.state_dict() for sample in ask.begun],
                }
                for ask in self._waiting
            ],
            "lengths": dict(self._lengths),
        }

    def load_state_dict(self, state: Mapping[str, Any], dataset: Examples) -> None:
        """Take the prompts back; their texts are read from ``dataset`` again."""
        self._waiting = [
            Ask(
                example=dataset[saved["index"]],
                step=saved["step"],
                number=saved["number"],
                begun=tuple(Sample.from_state(s) for s in saved["begun"]),
            )
            for saved in state["waiting"]
        ]
        self._lengths = {int(k): float(v) for k, v in state["lengths"].items()}


def unfinished(asks: Sequence[Ask], parts: Mapping[int, Sequence[Sample]]) -> list[Ask]:
    """Asks ``parts`` (by place in ``asks``) with what was drawn of them; nothing drawn: as if never
    begun.
    """
    left = []
    for number in sorted(parts):
        drawn = any(s.response_ids.numel() for s in parts[number])
        left.append(
            replace(asks[number], begun=tuple(parts[number]))
            if drawn
            else Ask(example=asks[number].example)
        )
    return left
