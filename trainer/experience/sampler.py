"""Responses of one rank, judged while others are still generated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from trainer.base.errors import UserError
from trainer.data import Example
from trainer.experience.prompts import Ask
from trainer.rewards import RewardRequest, Score, Scorer
from trainer.rewards.judging import Judging
from trainer.rollout import Finished, Generation, Group, Sample, Sampling
from trainer.tracking import Timers


class Speaker(Protocol):
    """Generates groups: a rollout engine, or one behind an agent."""

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.RolloutEngine`."""


@dataclass(kw_only=True)
class Rollouts:
    """What one rank generated, prompt after prompt: the prompt's place in the step, sample, score
    and text of each response.
    """

    prompts: list[int] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    unfinished: dict[int, list[Sample]] = field(default_factory=dict)
    """Prompts begun but not needed, with what was drawn of them."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How responses come about and are judged: while training, or for validation."""

    speaker: Speaker
    sampling: Sampling
    n: int
    """Responses of a prompt."""
    scorer: Scorer
    tokenizer: Any
    seed: int
    streaming: bool = True
    """Judge while generating; False: afterwards."""
    timer: str = ""
    """Put before the names of the timers."""

    def roll_out(
        self,
        asks: Mapping[int, Ask],
        timers: Timers,
        *,
        want: int | None = None,
        finished: Callable[[int, Sequence[Sample]], None] = lambda number, samples: None,
    ) -> Rollouts:
        """Generate and judge ``n`` responses of each of ``asks`` (by place in the step), begun in
        their order.

        Random numbers belong to (seed, step, number, sample) of an ask, so the share of a rank
        doesn't change what is drawn. With ``want``, stop when so many prompts are finished.
        ``finished`` is told of each at once. Timers: ``gen``, and ``reward`` for what judging takes
        after it.
        """
        places = list(asks)
        groups = [
            Group(
                prompt_ids=ask.example.prompt_ids,
                sample_ids=[ask.number * self.n + k for k in range(self.n)],
                step=ask.step,
                begun=ask.begun,
            )
            for ask in asks.values()
        ]
        done: dict[int, Sequence[Sample]] = {}
        order: list[int] = []
        unfinished: dict[int, list[Sample]] = {}
        judging = self.scorer.judging()
        try:
            with timers(self.timer + "gen"):
                generation = self.speaker.generate(groups, self.sampling, seed=self.seed)
                try:
                    for part in _up_to(generation, len(groups) if want is None else want):
                        place = places[part.number]
                        order.append(place)
                        done[place] = part.samples
                        if self.streaming:
                            self._judge(judging, asks[place].example, part.samples)
                        finished(place, part.samples)
                except (
                    UserError
                ):  # a reward's or an agent's: ranks that share the engine go on without this one
                    generation.stop()
                    raise
                if want is not None and want < len(groups):
                    unfinished = {places[left.number]: left.samples for left in generation.stop()}
            with timers(self.timer + "reward"):
                if not self.streaming:
                    for place in order:
                        self._judge(judging, asks[place].example, done[place])
                scores = judging.results()
        except BaseException:
            judging.cancel()
            raise
        by_place = {place: scores[i * self.n : (i + 1) * self.n] for i, place in enumerate(order)}
        result = Rollouts(unfinished=unfinished)
        for place in sorted(
            done
        ):  # not in the order of finishing: what follows shall not depend on it
            result.prompts += [place] * self.n
            result.samples += done[place]
            result.scores += by_place[place]
            result.texts += self._texts(done[place])
        return result

    def _judge(self, judging: Judging, example: Example, samples: Sequence[Sample]) -> None:
        for text in self._texts(samples):
            judging.submit(_request(example, text))

    def _texts(self, samples: Sequence[Sample]) -> list[str]:
        texts: list[str] = self.tokenizer.batch_decode(
            [_written(s) for s in samples], skip_special_tokens=True
        )
        return texts


def shares(count: int, ranks: int) -> list[int]:
    """Prompts of each rank; they differ by one at most."""
    return [len(range(rank, count, ranks)) for rank in range(ranks)]


def _up_to(generation: Generation, most: int) -> Iterator[Finished]:
    if most == 0:
        return
    for number, part in enumerate(generation, start=1):
        yield part
        if number == most:
            return


def _written(sample: Sample) -> Tensor:
    """What the model said; a tool's answers are not its own."""
    return sample.response_ids if sample.written is None else sample.response_ids[sample.written]


def _request(example: Example, text: str) -> RewardRequest:
    return RewardRequest(
        data_source=example.data_source,
        solution_text=text,
        ground_truth=example.ground_truth,
        extra_info=example.extra_info,
        index=example.index,
    )
