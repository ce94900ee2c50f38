"""Validation: responses to the validation prompts, their rewards averaged over all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.data import Example
from trainer.experience.batch import check_failed_share, reward_metrics
from trainer.experience.prompt_queue import PromptRequest
from trainer.experience.sampler import Rollouts, Sampler
from trainer.experience.weight_sync import raise_engine_failure
from trainer.ranks.world import World
from trainer.rollout import EngineFailed
from trainer.run.context import RunContext

VALIDATION_METRICS = (
    "val/reward",
    "val/reward/std",
    "val/response_length",
    "val/response_length/clip_ratio",
    "val/samples",
)
"""Metrics that every validation gives."""


def validate(ctx: RunContext, step: int) -> tuple[dict[str, float], list[Mapping[str, Any]]]:
    """Metrics of the validation set, the same on every rank, and some of this rank's generations.

    Both are empty without validation data or a reward for it. Raises EngineFailed on all ranks when
    one rank's engine is lost, AgreedError when one rank's reward function or agent fails or when
    more rewards fail than allowed, StopRequested when one is asked to stop.
    """
    if ctx.val_sampler is None or ctx.weight_sync is None or not ctx.val_examples:
        return {}, []
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
    count = ctx.config.trainer.log_val_generations
    return metrics, generation_rows(rollouts, ctx.val_examples, ctx.tokenizer, count)


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
