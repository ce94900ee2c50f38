"""Requests of one generation, and a tracker of what has been drawn and which groups are finished.

No vLLM in here, and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from trainer.rollout.group_check import ENGINE_LENGTH, FEWER_PROMPTS, require_valid_groups
from trainer.rollout.protocol import FinishedGroup, FinishReason, Group, NotFiniteError, Sample
from trainer.rollout.settings import Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """A response to draw, or the rest of one."""

    request_id: str
    group_number: int
    """Index of its group in the call."""
    sample_number: int
    """Index of its response in the group."""
    prompt_ids: list[int]
    """The prompt, followed by the tokens of the response that an earlier generation drew."""
    max_tokens: int
    seed: int
    step: int
    sample_id: int
    position: int
    """Of the first token to draw, in the response. With seed, step and sample id it determines the
    token's random number.
    """

    def with_id(self, request_id: str) -> Request:
        """Return the same request under another id."""
        return replace(self, request_id=request_id)


@dataclass
class _Row:
    """A request and the tokens that it has so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class RequestTracker:
    """The requests of ``groups`` and the tokens drawn for them. Only one thread may use it."""

    def __init__(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        *,
        seed: int,
        version: int,
        max_model_len: int,
    ) -> None:
        """``version`` is that of the weights; ``max_model_len`` is in tokens.

        Raises :class:`UserError` for an empty prompt, or one that leaves no room for its response.
        """
        self.groups = list(groups)
        self.version = version
        self.num_tokens = 0
        self.num_prompt_tokens = sum(len(group.prompt_ids) for group in self.groups)
        self._samples: list[list[Sample | None]] = []
        self._rows: dict[str, _Row] = {}
        """Unfinished requests by id, in the order of the groups."""
        self._finished: list[int] = []
        """Numbers of finished groups that were not yielded yet."""
        require_valid_groups(
            self.groups,
            sampling.max_response_length,
            max_model_len,
            limited_by=ENGINE_LENGTH,
            fix=FEWER_PROMPTS,
        )
        for number, group in enumerate(self.groups):
            samples = [
                self._begin(number, k, sampling.max_response_length, seed)
                for k in range(len(group.sample_ids))
            ]
            self._samples.append(samples)
            if None not in samples:
                self._finished.append(number)

    @property
    def unfinished(self) -> list[Request]:
        """Requests that have not ended, in the order of the groups."""
        return [row.request for row in self._rows.values()]

    def add_tokens(
        self, request_id: str, token_ids: Sequence[int], log_probs: Sequence[float]
    ) -> None:
        """Append tokens to a response.

        Raises NotFiniteError for a log-prob that is not finite.
        """
        row = self._rows[request_id]
        if not all(map(math.isfinite, log_probs)):
            raise NotFiniteError
        row.token_ids += token_ids
        row.log_probs += log_probs
        self.num_tokens += len(token_ids)

    def finish(self, request_id: str, reason: str | None) -> None:
        """Mark a response as complete: "stop" by an end token, anything else by its length."""
        row = self._rows.pop(request_id)
        number = row.request.group_number
        sample = self._sample(row, "stop" if reason == "stop" else "length")
        self._samples[number][row.request.sample_number] = sample
        if None not in self._samples[number]:
            self._finished.append(number)

    def pop_finished(self) -> Iterator[FinishedGroup]:
        """Yield each finished group once. A group that is not consumed stays for the next call."""
        while self._finished:
            number = self._finished.pop(0)
            samples = [sample for sample in self._samples[number] if sample is not None]
            yield FinishedGroup(number=number, samples=samples)

    def abort(self) -> list[FinishedGroup]:
        """Return every group not yet yielded, its unfinished samples "aborted" as they are."""
        numbers = set(self._finished)
        for row in self._rows.values():
            request = row.request
            self._samples[request.group_number][request.sample_number] = self._sample(
                row, "aborted"
            )
            numbers.add(request.group_number)
        self._rows = {}
        self._finished = sorted(numbers)
        return list(self.pop_finished())

    def stats(self) -> dict[str, float]:
        """Return the counters that every engine has."""
        return {"tokens": float(self.num_tokens), "prompt_tokens": float(self.num_prompt_tokens)}

    def _begin(self, number: int, k: int, max_tokens: int, seed: int) -> Sample | None:
        """Return sample ``k`` of group ``number`` if it has ended before, else add its request."""
        group = self.groups[number]
        begun = group.partial_samples[k] if group.partial_samples else None
        drawn: list[int] = [] if begun is None else begun.response_ids.tolist()
        if begun is not None and begun.finish_reason != "aborted":
            return begun
        if begun is not None and len(drawn) >= max_tokens:
            return replace(begun, finish_reason="length")
        request_id = f"{number}.{k}"
        request = Request(
            request_id=request_id,
            group_number=number,
            sample_number=k,
            prompt_ids=[*group.prompt_ids, *drawn],
            max_tokens=max_tokens - len(drawn),
            seed=seed,
            step=group.step,
            sample_id=group.sample_ids[k],
            position=len(drawn),
        )
        self._rows[request_id] = _Row(request)
        return None

    def _sample(self, row: _Row, reason: FinishReason) -> Sample:
        """Return the tokens of ``row``, behind those that an earlier generation drew."""
        ids = torch.tensor(row.token_ids, dtype=torch.int64)
        log_probs = torch.tensor(row.log_probs)
        group = self.groups[row.request.group_number]
        if not group.partial_samples:
            return Sample(ids, log_probs, reason, self.version)
        before = group.partial_samples[row.request.sample_number]
        version = before.version if len(before.response_ids) else self.version
        return Sample(
            torch.cat([before.response_ids, ids]),
            torch.cat([before.log_probs, log_probs]),
            reason,
            version,
        )
