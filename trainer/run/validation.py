"""Validation: responses to the validation prompts, their rewards averaged over all ranks."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.data import Example
from trainer.experience.batch import check_failed_share, reward_metrics
from trainer.experience.prompt_queue import PromptRequest
from trainer.experience.sampler import Rollouts, Sampler
from trainer.experience.weight_sync import raise_engine_failure
from trainer.ranks.world import World
from trainer.rewards import Score
from trainer.rewards.rules.final_answer import final_answer
from trainer.rewards.rules.plain_text import plain_text
from trainer.rollout import EngineFailed
from trainer.run.context import RunContext
from trainer.run.reference_scores import FILE, load_reference, save_reference
from trainer.run.sample_files import sample_rows
from trainer.run.source_metrics import PromptResult, source_metrics, win_rate
from trainer.tracking.optional_output import optional_output

VALIDATION_METRICS = (
    "val/reward",
    "val/reward/std",
    "val/response_length",
    "val/response_length/clip_ratio",
    "val/samples",
)
"""Metrics that every validation gives."""


VALIDATION_PREFIXES = ("val-core/", "val-aux/", "val_reward/")
"""How the names begin that depend on the data's sources and on what the reward function returns."""
WIN_RATE = "val/win_rate"


def validation_may_give(metric: str | None, seen: Collection[str]) -> bool:
    """Whether a validation still to come may give ``metric``. ``seen``: all names so far, with
    ``VALIDATION_METRICS`` in a run that validates.
    """
    if metric is None or not set(VALIDATION_METRICS).issubset(seen):
        return False
    if metric == WIN_RATE:  # not of the first validation
        return True
    if any(name.startswith("val-core/") for name in seen):
        return False
    return metric.startswith(VALIDATION_PREFIXES)


@dataclass(frozen=True)
class Validation:
    """What a validation gives; all of it is empty without prompts or a reward."""

    metrics: dict[str, float] = field(default_factory=dict)
    """The same on every rank."""
    generations: Sequence[Mapping[str, Any]] = ()
    """Some of this rank's responses."""
    samples: Sequence[Mapping[str, Any]] = ()
    """All of this rank's responses, where ``trainer.validation_data_dir`` asks for them."""


def validate(ctx: RunContext, step: int) -> Validation:
    """Answer the validation prompts with the policy of ``step``. Collective.

    Nothing is done without validation data or a reward for it. Raises EngineFailed on all ranks
    when one rank's engine is lost, AgreedError when one rank's reward function or agent fails or
    when more rewards fail than allowed, StopRequested when one is asked to stop.
    """
    if ctx.val_sampler is None or ctx.weight_sync is None or not ctx.val_examples:
        return Validation()
    if ctx.collector is not None:
        ctx.collector.drain()  # rollouts drawn ahead use the same engine, with other weights
    # Every validation draws the same random numbers: two of them differ by the policy alone.
    rollouts = Rollouts()
    failure: EngineFailed | UserError | StopRequested | None = None
    try:
        with ctx.weight_sync.ready(step, ctx.timers, prefix="val_"):
            try:
                _generate(ctx, ctx.val_sampler, rollouts)
            except (UserError, StopRequested) as error:
                failure = error
    except (EngineFailed, StopRequested) as error:
        failure = error
    raise_engine_failure(ctx.world, failure)
    check_failed_share(rollouts.scores, ctx.world, ctx.config.reward.max_failed_share)
    builtin_rule = ctx.config.custom_reward_function.path is None
    metrics = validation_metrics(rollouts, ctx.world)
    metrics |= reward_metrics(rollouts.scores, ctx.world, rule=builtin_rule, prefix="val_")
    results = gathered_results(rollouts, ctx.val_examples, ctx.world)
    metrics |= source_metrics(results)
    metrics |= _compared_with_reference(ctx, step, results)
    count = ctx.config.trainer.log_val_generations
    generations = generation_rows(rollouts, ctx.val_examples, ctx.tokenizer, count)
    samples: list[dict[str, Any]] = []
    if ctx.config.trainer.validation_data_dir is not None:
        samples = sample_rows(rollouts, ctx.val_examples, ctx.tokenizer, step)
    return Validation(metrics, generations, samples)


def _generate(ctx: RunContext, sampler: Sampler, rollouts: Rollouts) -> None:
    """Append this rank's share of the responses to ``rollouts``, one batch after the other."""
    total = len(ctx.val_examples)
    batch_size = ctx.config.data.val_batch_size or total
    for first in range(0, total, batch_size):
        end = min(first + batch_size, total)
        requests = {
            index: PromptRequest(example=ctx.val_examples[index], number=index)
            for index in range(first + ctx.world.rank, end, ctx.world.size)
        }
        part = sampler.roll_out(requests, ctx.timers)
        rollouts.prompt_indices.extend(part.prompt_indices)
        rollouts.samples.extend(part.samples)
        rollouts.scores.extend(part.scores)
        rollouts.texts.extend(part.texts)


def validation_metrics(rollouts: Rollouts, world: World) -> dict[str, float]:
    """``VALIDATION_METRICS`` over the responses of all ranks. Collective."""
    values = [score.value for score in rollouts.scores]
    sums = world.sum(
        {
            "n": float(len(values)),
            "sum": math.fsum(values),
            "squares": math.fsum(value * value for value in values),
            "tokens": float(sum(len(sample.response_ids) for sample in rollouts.samples)),
            "cut": float(sum(not sample.finished for sample in rollouts.samples)),
        }
    )
    n = max(sums["n"], 1.0)
    mean = sums["sum"] / n
    return {
        "val/reward": mean,
        "val/reward/std": math.sqrt(max(0.0, sums["squares"] / n - mean * mean)),
        "val/response_length": sums["tokens"] / n,
        "val/response_length/clip_ratio": sums["cut"] / n,
        "val/samples": sums["n"],
    }


def gathered_results(
    rollouts: Rollouts, examples: Sequence[Example], world: World
) -> list[PromptResult]:
    """What all ranks saw of each prompt, in the order of the prompts. Collective."""
    positions: dict[int, list[int]] = {}
    for position, index in enumerate(rollouts.prompt_indices):
        positions.setdefault(index, []).append(position)
    results = []
    for index, of_prompt in positions.items():
        example = examples[index]
        scores = [rollouts.scores[position] for position in of_prompt]
        values = {"reward": [score.value for score in scores]}
        if all("acc" in score.extra for score in scores):
            values["acc"] = [score.extra["acc"] for score in scores]
        answers = [rollouts.texts[position] for position in of_prompt]
        if len(scores) > 1:
            answers = [answer_of(text, score) for text, score in zip(answers, scores, strict=True)]
        results.append(
            PromptResult(
                index=index,
                source=example.data_source,
                digest=zlib.crc32(repr(example.prompt_ids).encode()),
                values=values,
                answers=answers if len(scores) > 1 else [""],
            )
        )
    gathered = [result for part in world.gather(results) for result in part]
    return sorted(gathered, key=lambda result: result.index)


def answer_of(text: str, score: Score) -> str:
    """What a response answers: as its reward function read it, else the answer that it states,
    else all of it.
    """
    if score.pred is not None:
        return score.pred
    answer = final_answer(text)
    if answer.stated and answer.texts:
        return plain_text(answer.texts[0])
    return text.strip()


def _compared_with_reference(
    ctx: RunContext, step: int, results: Sequence[PromptResult]
) -> dict[str, float]:
    """``val/win_rate`` against the validation before the first step, which is kept. Collective."""
    reference: dict[int, tuple[int, float]] = {}
    if ctx.world.is_main and step == 0 and not ctx.config.trainer.val_only:
        with optional_output(f"{ctx.run_dir}/{FILE}", _say):
            save_reference(ctx.run_dir, results)
    elif ctx.world.is_main:
        reference = load_reference(ctx.run_dir)
    rate = ctx.world.broadcast(win_rate(results, reference) if ctx.world.is_main else None)
    return {} if rate is None else {WIN_RATE: rate}


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def generation_rows(
    rollouts: Rollouts, examples: Sequence[Example], tokenizer: Any, count: int
) -> list[Mapping[str, Any]]:
    """The first ``count`` responses as text: prompt, response, ground truth, score and why
    a reward function gave none."""
    rows: list[Mapping[str, Any]] = []
    responses = zip(rollouts.prompt_indices[:count], rollouts.texts, rollouts.scores, strict=False)
    for index, text, score in responses:
        example = examples[index]
        rows.append(
            {
                "prompt": tokenizer.decode(example.prompt_ids, skip_special_tokens=True),
                "response": text,
                "ground_truth": str(example.ground_truth),
                "score": score.value,
                "reward_error": score.failed,
            }
        )
    return rows
