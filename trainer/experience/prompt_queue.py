"""The prompts of a step: new ones of the loader, and those that an earlier step left unfinished."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainer.config.schema import Config
from trainer.data import Example
from trainer.rollout import Sample

MAX_KNOWN_LENGTHS = 1_000_000
"""Prompts whose last response length is remembered, for the order in which they are begun."""


@dataclass(frozen=True, kw_only=True)
class PromptRequest:
    """A prompt to generate responses for. (``step``, ``number``) select its random numbers."""

    example: Example
    step: int = 0
    """The step that first requested it. 0: none yet."""
    number: int = 0
    """Its index among the requests of that step."""
    partial_samples: tuple[Sample, ...] = ()
    """What an earlier step generated: nothing, or one sample per response."""


class Examples(Protocol):
    """A data set: examples by index."""

    def __getitem__(self, index: int) -> Example: ...


class PromptQueue:
    """Prompts that wait for their responses. The same on every rank.

    A step begins ``over_sampling`` times as many prompts as it needs and puts the unfinished ones
    back, in front of all others. Their tokens are kept while the weights that generated them are at
    most ``max_staleness`` steps older than those being trained; otherwise they begin anew.
    """

    def __init__(
        self,
        batches: Iterator[list[Example]],
        *,
        over_sampling: float = 1.0,
        max_staleness: int = 0,
    ) -> None:
        self._batches = batches
        self._over_sampling = over_sampling
        self.max_staleness = max_staleness
        self._waiting: list[PromptRequest] = []
        self._before: dict[int, list[PromptRequest]] = {}
        """What waited before the last steps took theirs, as ``give_back`` restores it."""
        self._lengths: dict[int, float] = {}

    @classmethod
    def from_config(cls, config: Config, batches: Iterator[list[Example]]) -> PromptQueue:
        """A queue over the loader's ``batches``."""
        return cls(
            batches,
            over_sampling=config.actor_rollout_ref.rollout.over_sampling,
            max_staleness=config.algorithm.max_staleness,
        )

    def take(
        self, batch_size: int, step: int, version: int, *, first_number: int = 0
    ) -> list[PromptRequest]:
        """The prompts to begin in ``step`` for a batch of ``batch_size``, at least that many.

        ``version``: of the current weights. ``first_number``: of the first request, in a further
        round of the same step. Raises UserError for an example that can't be read.
        """
        count = math.ceil(batch_size * self._over_sampling - 1e-9)
        further = first_number > 0
        self._before = {
            k: waiting
            for k, waiting in self._before.items()
            if k == step - 1 or (further and k == step)
        }
        while len(self._waiting) < count:
            drawn = [PromptRequest(example=example) for example in next(self._batches)]
            self._waiting += drawn
            for waiting in self._before.values():
                waiting += drawn
        if not further:
            self._before[step] = list(self._waiting)
        taken = self._waiting[:count]
        self._waiting = self._waiting[count:]
        requests: list[PromptRequest] = []
        for request in taken:
            begun_by = [s.version for s in request.partial_samples if s.response_ids.numel()]
            staleness = version - min(begun_by, default=version)
            if request.step == 0 or staleness > self.max_staleness:
                number = first_number + len(requests)
                request = PromptRequest(example=request.example, step=step, number=number)
            requests.append(request)
        return requests

    def put_back(self, requests: Sequence[PromptRequest]) -> None:
        """Put ``requests`` in front of all others."""
        self._waiting = [*requests, *self._waiting]

    def give_back(self, step: int) -> None:
        """Undo ``take`` of ``step``, if it was called, and everything since: the next call takes
        the same prompts, with the same random numbers.
        """
        if step in self._before:
            self._waiting = self._before.pop(step)

    def forget_samples(self) -> None:
        """Begin every prompt that waits anew: weights that no longer exist have drawn its
        samples.
        """
        self._waiting = [PromptRequest(example=request.example) for request in self._waiting]
        self._before.clear()

    def record_lengths(self, examples: Sequence[Example], lengths: Sequence[float]) -> None:
        """Remember the mean response length of each example, tokens."""
        for example, length in zip(examples, lengths, strict=True):
            if len(self._lengths) < MAX_KNOWN_LENGTHS or example.index in self._lengths:
                self._lengths[example.index] = float(length)

    def longest_first(self, indices: Sequence[int], requests: Sequence[PromptRequest]) -> list[int]:
        """``indices`` into ``requests`` in the order to begin them: partial ones first, then those
        of unknown length, then by length as last measured, so that no long one begins last.
        """

        def key(index: int) -> tuple[bool, float]:
            request = requests[index]
            length = self._lengths.get(request.example.index, math.inf)
            return not request.partial_samples, -length

        return sorted(indices, key=key)

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors for a checkpoint."""
        waiting = [
            {
                "index": request.example.index,
                "step": request.step,
                "number": request.number,
                "begun": [sample.state_dict() for sample in request.partial_samples],
            }
            for request in self._waiting
        ]
        return {"waiting": waiting, "lengths": dict(self._lengths)}

    def load_state_dict(self, state: Mapping[str, Any], dataset: Examples) -> None:
        """Restore ``state_dict``; the texts of the prompts are read from ``dataset`` again."""
        self._waiting = [
            PromptRequest(
                example=dataset[saved["index"]],
                step=saved["step"],
                number=saved["number"],
                partial_samples=tuple(Sample.from_state(s) for s in saved["begun"]),
            )
            for saved in state["waiting"]
        ]
        self._lengths = {int(k): float(v) for k, v in state["lengths"].items()}


def with_samples(request: PromptRequest, samples: Sequence[Sample]) -> PromptRequest:
    """``request`` with ``samples`` as its partial ones, if they have any token; else as it is."""
    if not any(sample.response_ids.numel() for sample in samples):
        return request
    return replace(request, partial_samples=tuple(samples))


def to_resume(
    requests: Sequence[PromptRequest], samples: Mapping[int, Sequence[Sample]]
) -> list[PromptRequest]:
    """The requests that ``samples`` (by index in ``requests``) belong to, with these as their
    partial samples; a request without any token as a new one.
    """
    resumed = []
    for index in sorted(samples):
        request = requests[index]
        if any(sample.response_ids.numel() for sample in samples[index]):
            resumed.append(replace(request, partial_samples=tuple(samples[index])))
        else:
            resumed.append(PromptRequest(example=request.example))
    return resumed
