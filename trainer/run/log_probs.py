"""Log-probs that a step needs besides those of sampling: of the old policy and of the reference."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.algorithms import BY_COVARIANCE
from trainer.data import Batch
from trainer.experience.early_reference import EarlyReference, runs_early
from trainer.models.lora import adapters_off
from trainer.run.context import RunContext
from trainer.run.rollout_correction import corrects
from trainer.update.forward import local_log_probs, log_prob_column
from trainer.update.micro_batches import MicroBatchConfig, plan_micro_batches


def attach_old_log_probs(ctx: RunContext, batch: Batch) -> None:
    """Attach ``old_log_probs`` ``[tokens]`` where the update or the KL in the reward reads it.

    Without the column the ratio of PPO is 1: one optimizer step per rollout updates the policy that
    sampled. With stale samples the ratio refers to the weights that drew them.
    """
    actor = ctx.config.actor_rollout_ref.actor
    algorithm = ctx.config.algorithm
    prompts = ctx.config.data.train_batch_size
    several_optimizer_steps = actor.ppo_epochs * prompts > actor.ppo_mini_batch_size
    by_covariance = actor.policy_loss.loss_mode in BY_COVARIANCE
    correction = algorithm.rollout_correction
    if correction.bypass_mode or (algorithm.max_staleness and not corrects(correction)):
        batch.columns["old_log_probs"] = batch.columns["rollout_log_probs"]
    elif (
        several_optimizer_steps
        or algorithm.use_kl_in_reward
        or by_covariance
        or corrects(correction)
    ):
        with ctx.timers("old_log_prob"):
            batch.columns["old_log_probs"] = _log_probs(
                ctx, ctx.engine.module, batch, ctx.log_prob_pass
            )


def attach_ref_log_probs(ctx: RunContext, batch: Batch) -> None:
    """Attach ``ref_log_probs`` ``[tokens]`` when the run has a reference."""
    if ctx.reference is None:
        return
    with ctx.timers("ref"), adapters_off(ctx.reference) as reference:
        batch.columns["ref_log_probs"] = _log_probs(ctx, reference, batch, ctx.ref_pass)


def early_reference(ctx: RunContext) -> EarlyReference | None:
    """The reference's pass over responses that finish while others are generated.

    None without a reference, when the rollout engine leaves no time for it, when prompts are
    filtered, and when the reference is sharded, so that ranks would wait for each other.
    """
    config = ctx.ref_pass
    reference = ctx.reference
    if ctx.collector is None or reference is None:
        return None
    if ctx.config.algorithm.filter_groups.enable:  # most of a round may be left out
        return None
    if not runs_early(ctx.config.actor_rollout_ref.rollout):
        return None
    if config.sync != "step" or not config.dynamic:
        return None
    budget = config.budget if isinstance(config.budget, int) else config.budget[ctx.world.rank]
    rank_config = replace(config, budget=budget)

    def log_probs(batch: Batch) -> Tensor:
        plan = plan_micro_batches(batch, rank_config, 1, ctx.cost_model)
        micro_batches = [torch.from_numpy(indices) for indices in plan.micro_batches[0]]
        with adapters_off(reference) as module:
            return local_log_probs(
                module, batch, micro_batches, rank_config, temperature=ctx.objective.temperature
            )

    return EarlyReference(log_probs, budget=int(budget), n=ctx.collector.sampler.n)


def _log_probs(
    ctx: RunContext, module: nn.Module, batch: Batch, config: MicroBatchConfig
) -> Tensor:
    plan = plan_micro_batches(batch, config, ctx.world.size, ctx.cost_model)
    return log_prob_column(
        module, batch, plan, ctx.world, config, temperature=ctx.objective.temperature
    )
