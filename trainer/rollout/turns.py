"""Responses of several turns: the model speaks, an agent answers, token for token, until one of
them is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.rollout.agent import AgentRunner, Conversation, Message
from trainer.rollout.protocol import Finished, Generation, Group, RolloutEngine, Sample
from trainer.rollout.settings import Sampling
from trainer.rollout.template import ObservationTokens


class Turns:
    """Generates with ``engine``; what ``agent`` answers a turn with is put behind it and the model
    goes on.

    A turn ends with an end token. The agent's answer costs tokens of the response; one that leaves
    no room to go on ends the response by its length. Tokens that the model wrote are never decoded
    and tokenised again: the mask ``Sample.written`` tells them from the agent's.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        agent: AgentRunner,
        *,
        tokenizer: Any,
        observations: ObservationTokens,
        eos_ids: Sequence[int],
        max_turns: int,
    ) -> None:
        self.engine, self.agent, self.tokenizer, self.observations = (
            engine,
            agent,
            tokenizer,
            observations,
        )
        self.eos_ids, self.max_turns = frozenset(eos_ids), max_turns

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        return _Waves(self, groups, sampling, seed)

    def between_turns(self, sample: Sample) -> bool:
        """Whether its last token ended a turn and the agent has not answered yet."""
        return bool(sample.response_ids.numel()) and int(sample.response_ids[-1]) in self.eos_ids

    def answer(
        self, prompts: Sequence[Sequence[int]], samples: Sequence[Sample], limit: int
    ) -> list[Sample]:
        """Each sample, whose last turn ended, with the agent's answer behind it ("aborted": to be
        gone on with), or as it is when the agent has none, no turn is left, or no room.
        """
        asked = [
            i
            for i, s in enumerate(samples)
            if turns_of(s) < self.max_turns and len(s.response_ids) < limit
        ]
        answers = self.agent.answer([self.conversation(prompts[i], samples[i]) for i in asked])
        result = [replace(s, finish_reason="stop") for s in samples]
        for i, text in zip(asked, answers, strict=True):
            if text is None:
                continue
            sample, ids = samples[i], self.observations.ids(text)
            if len(sample.response_ids) + len(ids) >= limit:
                result[i] = replace(sample, finish_reason="length")
            else:
                result[i] = _extended(sample, ids)
        return result

    def conversation(self, prompt: Sequence[int], sample: Sample) -> Conversation:
        """What was said so far, as text."""
        messages: list[Message] = []
        for mine, ids in _runs(sample):
            text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
            messages.append(Message(role="assistant" if mine else "tool", content=text))
        return Conversation(
            prompt=self.tokenizer.decode(list(prompt), skip_special_tokens=False), messages=messages
        )


class _Waves:
    """Turn after turn of all groups together; a group is handed out when its last response is
    done.
    """

    def __init__(
        self, turns: Turns, groups: Sequence[Group], sampling: Sampling, seed: int
    ) -> None:
        self._turns, self._groups, self._sampling, self._seed = turns, groups, sampling, seed
        empty = Sample(torch.zeros(0, dtype=torch.int64), torch.zeros(0), "aborted")
        self._samples = {
            i: list(g.begun) or [empty] * len(g.sample_ids) for i, g in enumerate(groups)
        }
        self._open = set(self._samples)
        places = [(i, k) for i, row in self._samples.items() for k in range(len(row))]
        self._final = {(i, k) for i, k in places if self._samples[i][k].finish_reason != "aborted"}
        self._wave: Generation | None = None
        self._numbers: list[int] = []  # of the groups of the wave
        self._answer([(i, k) for i, k in places if turns.between_turns(self._samples[i][k])])

    def __iter__(self) -> Iterator[Finished]:
        yield from self._completed(sorted(self._open))
        while self._open:
            self._numbers = numbers = sorted(self._open)
            self._wave = self._turns.engine.generate(
                [replace(self._groups[i], begun=tuple(self._samples[i])) for i in numbers],
                self._sampling,
                seed=self._seed,
            )
            for finished in self._wave:
                number = numbers[finished.number]
                self._take(number, finished.samples)
                self._answer(
                    [
                        (number, k)
                        for k, s in enumerate(self._samples[number])
                        if s.finish_reason == "stop"
                    ]
                )
                yield from self._completed([number])
            self._wave = None

    def stop(self) -> list[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        if self._wave is not None:
            for finished in self._wave.stop():
                number = self._numbers[finished.number]
                self._take(number, finished.samples)
                self._samples[number] = [
                    replace(s, finish_reason="aborted")
                    if s.finish_reason == "stop" and (number, k) not in self._final
                    else s
                    for k, s in enumerate(self._samples[number])
                ]
        left = [Finished(number=i, samples=self._samples[i]) for i in sorted(self._open)]
        self._open.clear()
        return left

    def _take(self, number: int, samples: Sequence[Sample]) -> None:
        """What a wave drew, with the masks that an engine doesn't know of."""
        before = self._samples[number]
        self._samples[number] = [
            _masked(new, old) for new, old in zip(samples, before, strict=True)
        ]

    def _answer(self, places: Sequence[tuple[int, int]]) -> None:
        places = [place for place in places if place not in self._final]
        samples = [self._samples[i][k] for i, k in places]
        prompts = [self._groups[i].prompt_ids for i, _ in places]
        answered = self._turns.answer(prompts, samples, self._sampling.max_response_length)
        for (i, k), sample in zip(places, answered, strict=True):
            self._samples[i][k] = sample
            if sample.finish_reason != "aborted":
                self._final.add((i, k))

    def _completed(self, numbers: Sequence[int]) -> Iterator[Finished]:
        for i in numbers:
            if i in self._open and all(s.finish_reason != "aborted" for s in self._samples[i]):
                self._open.discard(i)
                yield Finished(number=i, samples=self._samples[i])


def turns_of(sample: Sample) -> int:
    """Turns that the model has spoken or begun."""
    return sum(mine for mine, _ in _runs(sample))


def _runs(sample: Sample) -> list[tuple[bool, list[int]]]:
    """The response in runs of one speaker each: (the model's, ids)."""
    ids: list[int] = sample.response_ids.tolist()
    mine: list[bool] = [True] * len(ids) if sample.written is None else sample.written.tolist()
    runs: list[tuple[bool, list[int]]] = []
    for own, token in zip(mine, ids, strict=True):
        if not runs or runs[-1][0] != own:
            runs.append((own, []))
        runs[-1][1].append(token)
    return runs


def _mask(sample: Sample) -> Tensor:
    return (
        torch.ones(len(sample.response_ids), dtype=torch.bool)
        if sample.written is None
        else sample.written
    )


def _masked(new: Sample, old: Sample) -> Sample:
    """``new``, which goes on from ``old``, with the mask of both."""
    if old.written is None:
        return new
    fresh = len(new.response_ids) - len(old.written)
    return replace(new, written=torch.cat([old.written, torch.ones(fresh, dtype=torch.bool)]))


def _extended(sample: Sample, ids: Sequence[int]) -> Sample:
    """With an answer's tokens, which nobody drew, behind it."""
    silent = torch.zeros(len(ids), dtype=torch.bool)
    return replace(
        sample,
        response_ids=torch.cat([sample.response_ids, torch.tensor(ids, dtype=torch.int64)]),
        log_probs=torch.cat([sample.log_probs, torch.zeros(len(ids))]),
        written=torch.cat([_mask(sample), silent]),
        finish_reason="aborted",
    )
