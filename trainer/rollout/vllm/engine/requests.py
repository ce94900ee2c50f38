"""One generation's books: what is still to be drawn, what has come, which groups are whole. No
vLLM, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from trainer.base.errors import UserError
from trainer.rollout.protocol import Finished, FinishReason, Group, NotFiniteError, Sample
from trainer.rollout.settings import KEY, Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """A response to draw, or the rest of one."""

    key: str
    number: int
    place: int
    """Where it stands in its group."""
    prompt_ids: list[int]
    """The prompt, and the tokens that an earlier generation drew behind it."""
    max_tokens: int
    seed: int
    step: int
    sample_id: int
    position: int
    """Of the first token drawn, in the response: with the three before it names its random
    number.
    """

    def renamed(self, key: str) -> Request:
        """The same under another key."""
        return replace(self, key=key)


@dataclass
class _Row:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class Tally:
    """Requests of ``groups`` and what came back of them. Not for several threads at once."""

    def __init__(
        self,
        groups: Sequence[Group],
        sampling: Sampling,
        *,
        seed: int,
        version: int,
        max_model_len: int,
    ) -> None:
        self.groups, self.version = list(groups), version
        self._done: list[list[Sample | None]] = []
        self._open: dict[str, _Row] = {}
        self._ready: list[int] = []
        for number, group in enumerate(self.groups):
            _check(group, sampling.max_response_length, max_model_len)
            samples: list[Sample | None] = []
            for place, sample_id in enumerate(group.sample_ids):
                begun = group.begun[place] if group.begun else None
                drawn = [] if begun is None else begun.response_ids.tolist()
                left = sampling.max_response_length - len(drawn)
                if begun is not None and begun.finish_reason != "aborted":
                    samples.append(begun)
                    continue
                if begun is not None and left <= 0:
                    samples.append(replace(begun, finish_reason="length"))
                    continue
                samples.append(None)
                key = f"{number}.{place}"
                self._open[key] = _Row(
                    Request(
                        key=key,
                        number=number,
                        place=place,
                        prompt_ids=[*group.prompt_ids, *drawn],
                        max_tokens=left,
                        seed=seed,
                        step=group.step,
                        sample_id=sample_id,
                        position=len(drawn),
                    )
                )
            self._done.append(samples)
            if None not in samples:
                self._ready.append(number)
        self.tokens = 0
        self.prompt_tokens = sum(len(g.prompt_ids) for g in self.groups)

    @property
    def open(self) -> list[Request]:
        """Requests that have not ended, in the order of the groups."""
        return [row.request for row in self._open.values()]

    def add(self, key: str, token_ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Tokens that came. Raises NotFiniteError for a log-prob that is not a number."""
        row = self._open[key]
        if not all(map(math.isfinite, log_probs)):
            raise NotFiniteError
        row.token_ids += token_ids
        row.log_probs += log_probs
        self.tokens += len(token_ids)

    def end(self, key: str, reason: str | None) -> None:
        """This response is whole: "stop" by an end token, else by its limit."""
        row = self._open.pop(key)
        request = row.request
        self._done[request.number][request.place] = self._sample(
            row, "stop" if reason == "stop" else "length"
        )
        if None not in self._done[request.number]:
            self._ready.append(request.number)

    def take(self) -> Iterator[Finished]:
        """Groups that became whole, one by one: those that nobody asks for are there the next
        time.
        """
        while self._ready:
            number = self._ready.pop(0)
            yield Finished(number=number, samples=[s for s in self._done[number] if s is not None])

    def stop(self) -> list[Finished]:
        """Every group that was not taken; open responses "aborted" with what came of them."""
        for row in self._open.values():
            self._done[row.request.number][row.request.place] = self._sample(row, "aborted")
        left = sorted({row.request.number for row in self._open.values()} | set(self._ready))
        self._open, self._ready = {}, left
        return list(self.take())

    def stats(self) -> dict[str, float]:
        """What every engine counts."""
        return {"tokens": float(self.tokens), "prompt_tokens": float(self.prompt_tokens)}

    def _sample(self, row: _Row, reason: FinishReason) -> Sample:
        ids, log_probs = torch.tensor(row.token_ids, dtype=torch.int64), torch.tensor(row.log_probs)
        group = self.groups[row.request.number]
        if not group.begun:
            return Sample(ids, log_probs, reason, self.version)
        before = group.begun[row.request.place]
        version = before.version if len(before.response_ids) else self.version
        return Sample(
            torch.cat([before.response_ids, ids]),
            torch.cat([before.log_probs, log_probs]),
            reason,
            version,
        )


def _check(group: Group, response: int, longest: int) -> None:
    prompt = len(group.prompt_ids)
    if prompt == 0:
        raise UserError("an empty prompt: there is nothing to generate from")
    if prompt + response > longest:
        raise UserError(
            f"a prompt of {prompt} tokens and a response of {response} are more than the {longest} "
            "that the engine "
            f"holds ({KEY}.prompt_length + response_length): raise data.max_prompt_length, or "
            "leave long prompts out"
        )
    if group.begun and len(group.begun) != len(group.sample_ids):
        raise ValueError(f"{len(group.begun)} samples begun for {len(group.sample_ids)} sample ids")
