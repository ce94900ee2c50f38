"""The responses of one rank, scored while others are still being generated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from trainer.base import signals
from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.config.schema import Config
from trainer.data import Example
from trainer.experience.generators import Generator
from trainer.experience.prompt_queue import PromptRequest
from trainer.rewards import OverlongPenalty, RewardRequest, Score, Scorer, ScoringRound
from trainer.rollout import Group, Sample, Sampling
from trainer.rollout.turns import model_turns, turn_messages
from trainer.tracking import Timers

VALIDATION_SEED = 0x5EED
"""Added to the seed in validation, so that its random numbers differ from training's."""

OnSamples = Callable[[int, Sequence[Sample]], None]
"""Called with the index of a finished request and its samples."""


class GenerationStopped(StopRequested):
    """A stop was requested while responses were generated or scored."""

    def __init__(self, cause: str, samples: dict[int, list[Sample]]) -> None:
        """``samples``: what was generated until then, by index of the request."""
        super().__init__(cause)
        self.samples = samples


@dataclass(kw_only=True)
class Rollouts:
    """The finished responses of one rank, prompt by prompt. Lists have one entry per response."""

    prompt_indices: list[int] = field(default_factory=list)
    """Index of the response's prompt among the requests of the step."""
    samples: list[Sample] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    baselines: list[float] | None = None
    """Reward of the greedy response to each response's prompt, where the sampler draws one."""
    unfinished: dict[int, list[Sample]] = field(default_factory=dict)
    """Partial samples of the prompts that were begun but not needed, by index of the request."""

    def only(self, indices: Collection[int], *, offset: int = 0) -> Rollouts:
        """The finished responses to the prompts ``indices``, which then have ``offset`` more."""
        at = [k for k, index in enumerate(self.prompt_indices) if index in indices]
        return Rollouts(
            prompt_indices=[self.prompt_indices[k] + offset for k in at],
            samples=[self.samples[k] for k in at],
            scores=[self.scores[k] for k in at],
            texts=[self.texts[k] for k in at],
            baselines=None if self.baselines is None else [self.baselines[k] for k in at],
        )

    def extend(self, other: Rollouts) -> None:
        """Append the finished responses of ``other``."""
        self.prompt_indices += other.prompt_indices
        self.samples += other.samples
        self.scores += other.scores
        self.texts += other.texts
        if other.baselines is not None:
            self.baselines = [*(self.baselines or []), *other.baselines]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Generates and scores the responses of training or of validation."""

    generator: Generator
    sampling: Sampling
    n: int
    """Responses per prompt."""
    scorer: Scorer
    tokenizer: Any
    seed: int
    overlong_penalty: OverlongPenalty | None = None
    """Added to the score of a long response."""
    streaming: bool = True
    """Score responses while others are generated. False: when all are finished."""
    timer_prefix: str = ""
    """Stands before the names of the timers."""
    greedy_baseline: bool = False
    """Also score one greedy response to each prompt (ReMax)."""

    @classmethod
    def from_config(
        cls,
        config: Config,
        generator: Generator,
        scorer: Scorer,
        tokenizer: Any,
        *,
        validation: bool = False,
    ) -> Sampler:
        """The sampler of training, or of ``validation`` with its own ``val_kwargs`` and seed, and
        without a penalty for long responses.
        """
        rollout = config.actor_rollout_ref.rollout
        settings = rollout.val_kwargs if validation else rollout
        sampling = Sampling(
            max_response_length=rollout.response_length,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            do_sample=settings.do_sample,
        )
        return cls(
            generator=generator,
            sampling=sampling,
            n=settings.n,
            scorer=scorer,
            tokenizer=tokenizer,
            seed=config.trainer.seed + (VALIDATION_SEED if validation else 0),
            overlong_penalty=None if validation else OverlongPenalty.from_config(config),
            streaming=rollout.streaming,
            timer_prefix="val_" if validation else "",
            greedy_baseline=config.algorithm.adv_estimator == "remax" and not validation,
        )

    def roll_out(
        self,
        requests: Mapping[int, PromptRequest],
        timers: Timers,
        *,
        stop_after: int | None = None,
        on_finished: OnSamples | None = None,
    ) -> Rollouts:
        """Generate and score ``n`` responses for each of ``requests`` (by index in the step), begun
        in their order. With ``stop_after``, stop when that many prompts are finished.

        Random numbers depend on (seed, step, number, sample) of a request, so they don't depend on
        how requests are divided between ranks. Timers: ``gen``, and ``reward`` for the scoring that
        lasts longer than the generation.

        Raises UserError when a reward function or an agent fails, EngineFailed when the engine is
        lost, and GenerationStopped soon after a stop was requested, in whatever it waits.
        """
        finished: dict[int, Sequence[Sample]] = {}
        scoring = self.scorer.begin_round()

        def receive(index: int, samples: Sequence[Sample]) -> None:
            finished[index] = samples
            if self.streaming:
                self._submit(scoring, requests[index].example, samples)
            if on_finished is not None:
                on_finished(index, samples)

        try:
            with timers(self.timer_prefix + "gen"):
                unfinished = self._generate(requests, stop_after, receive)
            with timers(self.timer_prefix + "reward"):
                if not self.streaming:
                    for index, samples in finished.items():
                        self._submit(scoring, requests[index].example, samples)
                scores = scoring.results()
        except StopRequested as stop:
            scoring.cancel()
            generated = {index: list(group) for index, group in finished.items()}
            if isinstance(stop, GenerationStopped):
                generated |= stop.samples
            raise GenerationStopped(stop.cause, generated) from stop
        except BaseException:
            scoring.cancel()
            raise
        rollouts = self._rollouts(finished, scores, unfinished)
        if self.greedy_baseline:
            rollouts.baselines = self._baselines(requests, finished, timers)
        return rollouts

    def _baselines(
        self,
        requests: Mapping[int, PromptRequest],
        finished: Mapping[int, Sequence[Sample]],
        timers: Timers,
    ) -> list[float]:
        """The reward of the greedy response to the prompt of each response, sorted by prompt."""
        greedy = replace(
            self,
            n=1,
            sampling=replace(self.sampling, do_sample=False),
            timer_prefix="baseline_",
            greedy_baseline=False,
        )
        anew = {i: replace(requests[i], partial_samples=()) for i in sorted(finished)}
        try:
            scores = greedy.roll_out(anew, timers).scores
        except StopRequested as stop:
            drawn = {index: list(group) for index, group in finished.items()}
            raise GenerationStopped(stop.cause, drawn) from stop
        return [score.value for score in scores for _ in range(self.n)]

    def _generate(
        self, requests: Mapping[int, PromptRequest], stop_after: int | None, on_finished: OnSamples
    ) -> dict[int, list[Sample]]:
        """Pass on each prompt that is finished; return the partial samples of the others."""
        indices = list(requests)
        groups = [self._group(request) for request in requests.values()]
        count = len(groups) if stop_after is None else stop_after
        generation = self.generator.generate(groups, self.sampling, seed=self.seed)
        try:
            for group in islice(generation, count):
                on_finished(indices[group.number], group.samples)
        except UserError:
            # Of a reward or agent: ranks that share the engine go on without this one.
            generation.stop()
            raise
        except StopRequested as stop:
            if signals.leaves_at_once():
                raise
            rest = {indices[group.number]: group.samples for group in generation.stop()}
            raise GenerationStopped(stop.cause, rest) from stop
        if count >= len(groups):
            return {}
        return {indices[group.number]: group.samples for group in generation.stop()}

    def _group(self, request: PromptRequest) -> Group:
        first = request.number * self.n
        return Group(
            prompt_ids=request.example.prompt_ids,
            sample_ids=list(range(first, first + self.n)),
            step=request.step,
            partial_samples=request.partial_samples,
        )

    def _submit(self, scoring: ScoringRound, example: Example, samples: Sequence[Sample]) -> None:
        for sample, text in zip(samples, self._texts(samples), strict=True):
            extra_info = dict(example.extra_info)
            turns: Sequence[Mapping[str, object]] = [{"role": "assistant", "content": text}]
            if sample.response_mask is not None:
                turns = turn_messages(sample, self.tokenizer)
                extra_info["turns"] = turns
            request = RewardRequest(
                data_source=example.data_source,
                solution_text=text,
                ground_truth=example.ground_truth,
                extra_info=extra_info,
                index=example.index,
                response_length=len(sample.response_ids),
                finish_reason=sample.finish_reason,
                turns=tuple(turns),
            )
            scoring.submit(request)

    def _texts(self, samples: Sequence[Sample]) -> list[str]:
        """What the model wrote in each sample, one turn per line where there are several."""
        texts = []
        for sample in samples:
            turns = self.tokenizer.batch_decode(model_turns(sample), skip_special_tokens=True)
            texts.append("\n".join(turns))
        return texts

    def _rollouts(
        self,
        finished: Mapping[int, Sequence[Sample]],
        scores: Sequence[Score],
        unfinished: dict[int, list[Sample]],
    ) -> Rollouts:
        """Sorted by prompt: nothing that follows depends on the order of finishing, which
        ``finished`` and ``scores`` have.
        """
        scores_of = {
            index: scores[i * self.n : (i + 1) * self.n] for i, index in enumerate(finished)
        }
        result = Rollouts(unfinished=unfinished)
        for index in sorted(finished):
            result.prompt_indices += [index] * self.n
            result.samples += finished[index]
            result.scores += self._penalised(scores_of[index], finished[index])
            result.texts += self._texts(finished[index])
        return result

    def _penalised(self, scores: Sequence[Score], samples: Sequence[Sample]) -> Sequence[Score]:
        """``scores`` with the penalty for long responses added, if there is one."""
        if self.overlong_penalty is None:
            return scores
        return [
            self.overlong_penalty.applied(score, len(sample.response_ids))
            for score, sample in zip(scores, samples, strict=True)
        ]


def prompts_per_rank(count: int, ranks: int) -> list[int]:
    """Number of prompts of each rank, [ranks]; they differ by one at most."""
    return [len(range(rank, count, ranks)) for rank in range(ranks)]
