"""The training step on one screen, for RL and SFT: from rollout to update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.base import signals
from trainer.base.signals import StopRequested
from trainer.data import Batch, Example, Position, to_sft_batch
from trainer.experience.batch import (
    check_failed_share,
    experience_metrics,
    mask_truncated,
    mean_response_lengths,
    reward_metrics,
    to_batch,
)
from trainer.parallel.exchange import gather
from trainer.ranks.agreement import agreed, begin_update
from trainer.run.attach_advantages import attach_advantages
from trainer.run.context import RunContext
from trainer.run.log_probs import attach_old_log_probs, attach_ref_log_probs, early_reference
from trainer.run.policy_update import update_policy
from trainer.run.rollout_correction import attach_rollout_correction
from trainer.run.sample_files import sample_rows
from trainer.run.value_update import attach_values, update_critic
from trainer.update.optimizer_step import OptimizerStep


@dataclass(frozen=True)
class TrainingStep:
    """The result of one training step (verl's global step)."""

    batch: Batch
    """The whole batch, the same on every rank."""
    optimizer_steps: Sequence[OptimizerStep]
    metrics: dict[str, float]
    samples: Sequence[Mapping[str, Any]] = ()
    """This rank's responses as text, where ``trainer.rollout_data_dir`` asks for them."""


def training_step(ctx: RunContext, step: int, sft_batches: Iterator[list[Example]]) -> TrainingStep:
    """Take training step ``step``, counted from 1. Collective.

    Raises EngineFailed or AgreedError, on all ranks alike, when a rank lost its rollout engine or
    met wrong input, and StopRequested when one was asked to stop before the update. Weights and
    state are then those of the step before.
    """
    started = time.perf_counter()
    samples: Sequence[Mapping[str, Any]] = ()
    position = ctx.loader.position
    try:
        if ctx.is_rl:
            batch, metrics, samples = generate_experience(ctx, step)
        else:
            batch, metrics = next_sft_batch(ctx, sft_batches)
        begin_update(ctx.world)
    except StopRequested:
        give_back(ctx, step, position)
        raise
    ctx.stop_step = step
    if ctx.collector is not None:
        ctx.collector.record_lengths(*mean_response_lengths(batch))
        with ctx.timers("adv"):
            metrics |= attach_advantages(ctx, batch)
        # The update reads none of these; what it needs of them is in the advantages.
        batch.drop("rewards", "baselines", "finished", "versions")
    if ctx.critic is not None:
        metrics |= update_critic(ctx, ctx.critic, batch, step)
    optimizer_steps: list[OptimizerStep] = []
    if ctx.critic is None or step > ctx.config.trainer.critic_warmup:
        with ctx.timers("update_actor"):
            optimizer_steps, update_metrics = update_policy(ctx, batch, step)
        metrics |= update_metrics
    ctx.samples_seen += len(batch)
    ctx.timers.add("step", time.perf_counter() - started)
    ctx.productive_s += ctx.timers.seconds("step")
    return TrainingStep(batch, optimizer_steps, metrics, samples)


def generate_experience(
    ctx: RunContext, step: int
) -> tuple[Batch, dict[str, float], Sequence[Mapping[str, Any]]]:
    """Rollout, rewards and log-probs of the prompts of ``step``: the whole batch on every rank, its
    metrics, and this rank's responses as text where they are asked for.
    """
    collector = ctx.collector
    if collector is None:
        raise AssertionError("an RL run has a rollout collector")
    version = step - 1  # training steps that the weights have seen
    early_ref = early_reference(ctx)
    requests, rollouts = collector.collect(
        step, version, ctx.timers, last=step == ctx.total_steps, on_finished=early_ref
    )
    check_failed_share(rollouts.scores, ctx.world, ctx.config.reward.max_failed_share)
    samples: Sequence[Mapping[str, Any]] = ()
    if ctx.config.trainer.rollout_data_dir is not None:
        examples = [request.example for request in requests]
        samples = sample_rows(rollouts, examples, ctx.tokenizer, step)
    rank_batch = to_batch(rollouts, requests, collector.sampler.n)
    if early_ref is not None:
        with ctx.timers("ref"):
            early_ref.attach(rank_batch, rollouts, requests)
    batch = gather(rank_batch, ctx.world)
    metrics = experience_metrics(batch, version) | collector.stats()
    builtin_rule = ctx.config.custom_reward_function.path is None
    metrics |= reward_metrics(rollouts.scores, ctx.world, rule=builtin_rule)
    if ctx.config.algorithm.mask_truncated_completions:
        mask_truncated(batch)
    attach_old_log_probs(ctx, batch)
    metrics |= attach_rollout_correction(ctx.config.algorithm.rollout_correction, batch)
    if not ctx.config.actor_rollout_ref.rollout.calculate_log_probs:
        batch.drop("rollout_log_probs")
    if early_ref is None:
        attach_ref_log_probs(ctx, batch)
    attach_values(ctx, batch)
    return batch, metrics, samples


def give_back(ctx: RunContext, step: int, position: Position) -> None:
    """Put back what was taken for ``step``, which is left before its update. Collective.

    ``position``: the loader's before the step.
    """
    if signals.leaves_at_once():  # a checkpoint holds it as it was, and other ranks have left
        return
    if ctx.collector is not None:
        ctx.collector.give_back(step)
    else:
        ctx.loader.go_back(position)


def next_sft_batch(
    ctx: RunContext, batches: Iterator[list[Example]]
) -> tuple[Batch, dict[str, float]]:
    """The next prompts with their responses; the whole batch on every rank."""
    with ctx.timers("data_wait"), agreed(ctx.world):
        examples = next(batches)
    batch = to_sft_batch(examples)
    batch.rows["groups"] = torch.arange(len(batch))  # every prompt has one response
    return batch, {"train/sequences": float(len(batch))}
