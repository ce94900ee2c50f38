"""Responses of several turns: the model writes one, an agent answers, until one of them is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from trainer.config.schema import Data
from trainer.config.schema.rollout import Agent
from trainer.data.chat_template import ChatTemplate, read_template
from trainer.rollout.agent import AgentRunner, Conversation, Message
from trainer.rollout.load_agent import load_agent
from trainer.rollout.protocol import FinishedGroup, Generation, Group, RolloutEngine, Sample
from trainer.rollout.settings import Sampling
from trainer.rollout.template import ObservationTokens


class MultiTurnGenerator:
    """Generates with ``engine``; the agent's answer to a turn is appended to the response, and the
    model continues.

    A turn ends with an end token. The agent's answer counts as tokens of the response; one that
    leaves no room for another turn ends the response by its length. Tokens of the model are never
    decoded and tokenised again: the mask ``Sample.response_mask`` separates them from the agent's.
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
        self.engine = engine
        self.agent = agent
        self.tokenizer = tokenizer
        self.observations = observations
        self.eos_ids = frozenset(eos_ids)
        self.max_turns = max_turns

    @classmethod
    def from_config(
        cls,
        agent: Agent,
        data: Data,
        engine: RolloutEngine,
        tokenizer: Any,
        *,
        eos_ids: Sequence[int],
    ) -> MultiTurnGenerator:
        """The agent of ``actor_rollout_ref.rollout.agent``, whose name is set, around ``engine``.

        Raises UserError when the agent can't be loaded, or the chat template has no turn for its
        answers.
        """
        if agent.name is None:
            raise ValueError("no agent is set")
        runner = AgentRunner(
            load_agent(agent.name, agent.path), name=agent.name, timeout_s=agent.turn_timeout_s
        )
        template = ChatTemplate(
            tokenizer, read_template(data.chat_template), data.apply_chat_template_kwargs
        )
        observations = ObservationTokens(
            tokenizer, template, max_length=agent.max_observation_length
        )
        return cls(
            engine,
            runner,
            tokenizer=tokenizer,
            observations=observations,
            eos_ids=eos_ids,
            max_turns=agent.max_turns,
        )

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """Begin to generate ``groups``, as ``RolloutEngine.generate`` does.

        The iteration raises UserError when the agent fails.
        """
        return _MultiTurnGeneration(self, groups, sampling, seed)

    def ends_turn(self, sample: Sample) -> bool:
        """Whether the last token of ``sample`` ended a turn that the agent has not answered yet."""
        return bool(sample.response_ids.numel()) and int(sample.response_ids[-1]) in self.eos_ids

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        samples: Sequence[Sample],
        max_response_length: int,
    ) -> list[Sample]:
        """Append the agent's answers to ``samples``, each of which ended a turn.

        A sample with an answer is "aborted", to be continued. It comes back finished when the agent
        has no answer, no turn is left, or the answer leaves no room.
        """
        asked = [
            i
            for i, sample in enumerate(samples)
            if count_turns(sample) < self.max_turns
            and len(sample.response_ids) < max_response_length
        ]
        answers = self.agent.answer([self.conversation(prompts[i], samples[i]) for i in asked])
        answered = [replace(sample, finish_reason="stop") for sample in samples]
        for i, text in zip(asked, answers, strict=True):
            if text is None:
                continue
            ids = self.observations.ids(text)
            if len(samples[i].response_ids) + len(ids) >= max_response_length:
                answered[i] = replace(samples[i], finish_reason="length")
            else:
                answered[i] = _append_observation(samples[i], ids)
        return answered

    def conversation(self, prompt: Sequence[int], sample: Sample) -> Conversation:
        """The turns of ``sample`` so far, as text."""
        return Conversation(
            prompt=self.tokenizer.decode(list(prompt), skip_special_tokens=False),
            messages=turn_messages(sample, self.tokenizer),
        )


class _MultiTurnGeneration:
    """A ``Generation``: one engine call after another, each for the next turn of all open groups.
    A group is finished with its last response.
    """

    def __init__(
        self,
        generator: MultiTurnGenerator,
        groups: Sequence[Group],
        sampling: Sampling,
        seed: int,
    ) -> None:
        self._generator = generator
        self._groups = groups
        self._sampling = sampling
        self._seed = seed
        empty = Sample(torch.zeros(0, dtype=torch.int64), torch.zeros(0), "aborted")
        self._samples: dict[int, list[Sample]] = {}
        self._open: set[int] = set()
        """Groups that are not handed out yet."""
        self._final: set[tuple[int, int]] = set()
        """(group, index in it) of the responses that are done."""
        self._turn: Generation | None = None
        """The engine call under way."""
        self._turn_groups: list[int] = []
        """The group of each group of that call."""
        ended_turns = []
        for number, group in enumerate(groups):
            samples = list(group.partial_samples) or [empty] * len(group.sample_ids)
            self._samples[number] = samples
            self._open.add(number)
            for k, sample in enumerate(samples):
                if sample.finish_reason != "aborted":
                    self._final.add((number, k))
                if generator.ends_turn(sample):
                    ended_turns.append((number, k))
        self._answer(ended_turns)

    def __iter__(self) -> Iterator[FinishedGroup]:
        """Each group as soon as its last response is done."""
        yield from self._finished(sorted(self._open))
        while self._open:
            numbers = sorted(self._open)
            self._turn_groups = numbers
            self._turn = self._generator.engine.generate(
                [
                    replace(self._groups[i], partial_samples=tuple(self._samples[i]))
                    for i in numbers
                ],
                self._sampling,
                seed=self._seed,
            )
            for group in self._turn:
                number = numbers[group.number]
                self._store(number, group.samples)
                stopped = [
                    (number, k)
                    for k, sample in enumerate(self._samples[number])
                    if sample.finish_reason == "stop"
                ]
                self._answer(stopped)
                yield from self._finished([number])
            self._turn = None

    def stop(self) -> list[FinishedGroup]:
        """End early; a response whose agent has not answered yet is "aborted" too."""
        if self._turn is not None:
            for group in self._turn.stop():
                number = self._turn_groups[group.number]
                self._store(number, group.samples)
        for number in self._open:
            for k, sample in enumerate(self._samples[number]):
                if sample.finish_reason == "stop" and (number, k) not in self._final:
                    self._samples[number][k] = replace(sample, finish_reason="aborted")
        rest = [FinishedGroup(number=i, samples=self._samples[i]) for i in sorted(self._open)]
        self._open.clear()
        return rest

    def _store(self, number: int, samples: Sequence[Sample]) -> None:
        """Keep the samples of the engine, which knows of no masks, with theirs."""
        previous = self._samples[number]
        self._samples[number] = [
            _with_mask(new, old) for new, old in zip(samples, previous, strict=True)
        ]

    def _answer(self, responses: Sequence[tuple[int, int]]) -> None:
        """Let the agent answer those of ``responses`` (group, index in it) that are not done."""
        responses = [response for response in responses if response not in self._final]
        samples = [self._samples[i][k] for i, k in responses]
        prompts = [self._groups[i].prompt_ids for i, _ in responses]
        limit = self._sampling.max_response_length
        answered = self._generator.answer(prompts, samples, limit)
        for (i, k), sample in zip(responses, answered, strict=True):
            self._samples[i][k] = sample
            if sample.finish_reason != "aborted":
                self._final.add((i, k))

    def _finished(self, numbers: Sequence[int]) -> Iterator[FinishedGroup]:
        """Hand out those of the groups ``numbers`` whose responses are all done."""
        for i in numbers:
            done = all(sample.finish_reason != "aborted" for sample in self._samples[i])
            if i in self._open and done:
                self._open.discard(i)
                yield FinishedGroup(number=i, samples=self._samples[i])


def count_turns(sample: Sample) -> int:
    """Number of turns that the model has written or begun."""
    return sum(by_model for by_model, _ in _split_turns(sample))


def turn_messages(sample: Sample, tokenizer: Any) -> list[Message]:
    """The turns of a response as messages of the model and of its tool."""
    messages: list[Message] = []
    for by_model, ids in _split_turns(sample):
        text = tokenizer.decode(ids, skip_special_tokens=True).strip()
        messages.append(Message(role="assistant" if by_model else "tool", content=text))
    return messages


def model_turns(sample: Sample) -> list[list[int]]:
    """Token ids of the turns that the model wrote, without those of a tool."""
    return [ids for by_model, ids in _split_turns(sample) if by_model]


def _split_turns(sample: Sample) -> list[tuple[bool, list[int]]]:
    """The response in turns: (whether the model wrote it, token ids)."""
    if sample.response_mask is None:
        return [(True, sample.response_ids.tolist())] if len(sample.response_ids) else []
    turns: list[tuple[bool, list[int]]] = []
    mask: list[bool] = sample.mask().tolist()
    for by_model, token in zip(mask, sample.response_ids.tolist(), strict=True):
        if not turns or turns[-1][0] != by_model:
            turns.append((by_model, []))
        turns[-1][1].append(token)
    return turns


def _with_mask(new: Sample, old: Sample) -> Sample:
    """``new``, which continues ``old``, with a mask that covers both."""
    if old.response_mask is None:
        return new
    fresh = len(new.response_ids) - len(old.response_mask)
    mask = torch.cat([old.response_mask, torch.ones(fresh, dtype=torch.bool)])
    return replace(new, response_mask=mask)


def _append_observation(sample: Sample, ids: Sequence[int]) -> Sample:
    """Append an answer's tokens, which have no log-prob, and mark the sample to be continued."""
    masked_out = torch.zeros(len(ids), dtype=torch.bool)
    return replace(
        sample,
        response_ids=torch.cat([sample.response_ids, torch.tensor(ids, dtype=torch.int64)]),
        log_probs=torch.cat([sample.log_probs, torch.zeros(len(ids))]),
        response_mask=torch.cat([sample.mask(), masked_out]),
        finish_reason="aborted",
    )
