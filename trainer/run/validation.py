"""Validation: the policy answers the validation prompts, the reward judges; mean and deviation over
all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.base.errors import UserError
from trainer.data import Example
from trainer.experience.batch import reward_metrics
from trainer.experience.prompts import Ask
from trainer.experience.sampler import Rollouts, Sampler
from trainer.experience.weight_sync import same_on_all
from trainer.ranks.world import World
from trainer.rollout import EngineFailed
from trainer.run.build import Context

VALIDATION_METRICS = (
    "val/reward",
    "val/reward/std",
    "val/response_length",
    "val/response_length/clip_ratio",
    "val/samples",
)
"""What a validation measures."""


def validate(ctx: Context, step: int) -> tuple[dict[str, float], list[Mapping[str, Any]]]:
    """Metrics of the validation set, the same on every rank, and some generations as this rank read
    them.

    Nothing without validation data, or when nobody can judge the answers. Raises EngineFailed on
    all ranks when one rank's engine is lost, AgreedError when one rank's reward function or agent
    fails.
    """
    if ctx.val_sampler is None or ctx.synced is None or not ctx.val_examples:
        return {}, []
    if ctx.rolling is not None:
        ctx.rolling.settle()  # one engine: what is drawn ahead comes first, and by its own weights
    # Every validation draws the same random numbers: what differs between two of them is the
    # policy.
    rollouts = Rollouts()
    lost: EngineFailed | UserError | None = None
    try:
        with ctx.synced.ready(step, ctx.timers, prefix="val_"):
            try:
                _draw(ctx, ctx.val_sampler, rollouts)
            except UserError as error:
                lost = error
    except EngineFailed as error:
        lost = error
    same_on_all(ctx.world, lost)
    most, rule = (
        ctx.config.trainer.log_val_generations,
        ctx.config.custom_reward_function.path is None,
    )
    metrics = validation_metrics(rollouts, ctx.world)
    metrics |= reward_metrics(rollouts.scores, ctx.world, rule=rule, prefix="val_")
    return metrics, generation_rows(rollouts, ctx.val_examples, ctx.tokenizer, most)


def _draw(ctx: Context, sampler: Sampler, rollouts: Rollouts) -> None:
    """This rank's share of the responses, batch by batch."""
    size = ctx.config.data.val_batch_size or len(ctx.val_examples)
    for first in range(0, len(ctx.val_examples), size):
        numbers = range(
            first + ctx.world.rank, min(first + size, len(ctx.val_examples)), ctx.world.size
        )
        part = sampler.roll_out(
            {i: Ask(example=ctx.val_examples[i], number=i) for i in numbers}, ctx.timers
        )
        rollouts.prompts.extend(part.prompts)
        rollouts.samples.extend(part.samples)
        rollouts.scores.extend(part.scores)
        rollouts.texts.extend(part.texts)


def validation_metrics(rollouts: Rollouts, world: World) -> dict[str, float]:
    """``val/reward/{mean,std}``, ``val/reward`` and ``val/response_length``, over the responses of
    all ranks.
    """
    values = [s.value for s in rollouts.scores]
    sums = world.sum(
        {
            "n": float(len(values)),
            "sum": math.fsum(values),
            "squares": math.fsum(v * v for v in values),
            "tokens": float(sum(len(s.response_ids) for s in rollouts.samples)),
            "cut": float(sum(not s.finished for s in rollouts.samples)),
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
    rollouts: Rollouts, examples: Sequence[Example], tokenizer: Any, most: int
) -> list[Mapping[str, Any]]:
    """The first ``most`` prompts with their answers, as people read them."""
    rows: list[Mapping[str, Any]] = []
    for number, text, score in zip(
        rollouts.prompts[:most], rollouts.texts, rollouts.scores, strict=False
    ):
        prompt = tokenizer.decode(examples[number].prompt_ids, skip_special_tokens=True)
        truth = str(examples[number].ground_truth)
        rows.append(
            {"prompt": prompt, "response": text, "ground_truth": truth, "score": score.value}
        )
    return rows
