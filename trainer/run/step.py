"""One iteration of training: a batch of prompts in, optimizer steps taken, metrics out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from trainer.algorithms import compute_advantages, kl_estimate, learning_rate, sequence_index
from trainer.batching import adaptive_clip
from trainer.data import Batch, Example, to_sft_batch
from trainer.experience.batch import (
    experience_metrics,
    mean_response_lengths,
    reward_metrics,
    to_batch,
)
from trainer.experience.early_reference import EarlyReference
from trainer.experience.weight_sync import agreed
from trainer.models.lora import adapters_off
from trainer.parallel.exchange import gather
from trainer.run.build import Context
from trainer.run.reference import follow
from trainer.update.forward import log_prob_column
from trainer.update.micro_batches import Stowage, stow
from trainer.update.optimizer_step import Update, update


def sft_batch(ctx: Context, batches: Iterator[list[Example]]) -> tuple[Batch, dict[str, float]]:
    """The next prompts with their responses; the whole batch on every rank."""
    with ctx.timers("data_wait"), agreed(ctx.world):
        examples = next(batches)
    batch = to_sft_batch(examples)
    batch.rows["groups"] = torch.arange(len(batch))
    return batch, {"train/sequences": float(len(batch))}


def rl_batch(ctx: Context, step: int) -> tuple[Batch, dict[str, float]]:
    """rollout -> reward -> log-probs -> advantages; the whole batch on every rank."""
    rolling = ctx.rolling
    if rolling is None:
        raise AssertionError("an RL run has rollouts")
    early, version = (
        EarlyReference.of(ctx),
        step - 1,
    )  # iterations that the weights at hand have been trained
    asks, rollouts = rolling.collect(
        step, version, ctx.timers, last=step == ctx.total_steps, finished=early
    )
    mine = to_batch(rollouts, asks, rolling.sampler.n)
    if early is not None:
        with ctx.timers("ref"):
            early.attach(mine, rollouts, asks)
    batch = gather(mine, ctx.world)
    groups, response_lengths = mean_response_lengths(batch)
    rolling.prompts.observe([asks[g].example for g in groups], response_lengths)
    metrics = experience_metrics(batch, version) | rolling.stats()
    rule = ctx.config.custom_reward_function.path is None
    metrics |= reward_metrics(rollouts.scores, ctx.world, rule=rule)
    actor, algorithm = ctx.config.actor_rollout_ref.actor, ctx.config.algorithm
    if algorithm.max_staleness:
        # Older weights drew some of it: the ratio of PPO is to the policy that did.
        batch.columns["old_log_probs"] = batch.columns["rollout_log_probs"]
    elif actor.ppo_epochs * rolling.want > actor.ppo_mini_batch_size or algorithm.use_kl_in_reward:
        with ctx.timers("old_log_prob"):
            batch.columns["old_log_probs"] = _log_probs(
                ctx, ctx.engine.module, batch, ctx.forward_stowage
            )
    if not ctx.config.actor_rollout_ref.rollout.calculate_log_probs:
        batch.drop("rollout_log_probs")
    if ctx.reference is not None and early is None:
        with ctx.timers("ref"), adapters_off(ctx.reference) as reference:
            batch.columns["ref_log_probs"] = _log_probs(ctx, reference, batch, ctx.ref_stowage)
    with ctx.timers("adv"):
        metrics |= _advantages(ctx, batch)
    batch.drop("rewards", "finished", "versions")
    return batch, metrics


def _log_probs(
    ctx: Context, module: torch.nn.Module, batch: Batch, stowage: Stowage
) -> torch.Tensor:
    plan = stow(batch, stowage, ctx.world.size, ctx.cost)
    return log_prob_column(
        module, batch, plan, ctx.world, stowage, temperature=ctx.objective.temperature
    )


def _advantages(ctx: Context, batch: Batch) -> dict[str, float]:
    """Attach advantages; the KL penalty in the reward and its controller where the settings ask for
    it.
    """
    algorithm, mask = ctx.config.algorithm, batch.columns["loss_mask"]
    metrics: dict[str, float] = {}
    kl = None
    if algorithm.use_kl_in_reward:
        kl = (
            kl_estimate(
                batch.columns["old_log_probs"], batch.columns["ref_log_probs"], algorithm.kl_penalty
            )
            * mask
        )
        metrics["actor/reward_kl_penalty"] = mean_kl = float(kl[mask].mean())
        metrics["actor/reward_kl_penalty_coeff"] = ctx.kl.coef
    found = compute_advantages(
        algorithm.adv_estimator,
        scores=batch.rows["rewards"],
        groups=batch.rows["groups"],
        mask=mask,
        sequence=sequence_index(batch.cu_seqlens),
        kl=kl,
        kl_coef=ctx.kl.coef,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )
    if kl is not None:
        ctx.kl.update(mean_kl, len(batch))
    batch.columns["advantages"] = found.advantages
    trained = found.advantages[mask]
    metrics |= {
        "critic/advantages/mean": float(trained.mean()),
        "critic/advantages/max": float(trained.max()),
        "critic/advantages/min": float(trained.min()),
    }
    return metrics


def mini_batches(ctx: Context, batch: Batch, step: int) -> Iterator[Batch]:
    """The batch of each optimizer step: ``ppo_mini_batch_size`` prompts with all their responses,
    epoch after epoch.

    The order of prompts is that of the batch, or shuffled by (seed, step, epoch) with
    ``actor.shuffle``.
    """
    actor = ctx.config.actor_rollout_ref.actor
    groups = torch.unique(batch.rows["groups"])
    for epoch in range(actor.ppo_epochs):
        order = torch.arange(len(groups))
        if actor.shuffle:
            draw = torch.Generator().manual_seed(
                (ctx.config.trainer.seed * 1_000_003 + step) * 1_009 + epoch
            )
            order = torch.randperm(len(groups), generator=draw)
        for chosen in torch.split(groups[order], actor.ppo_mini_batch_size):
            yield batch.select(torch.isin(batch.rows["groups"], chosen).nonzero().squeeze(-1))


def update_policy(ctx: Context, batch: Batch, step: int) -> tuple[list[Update], dict[str, float]]:
    """All optimizer steps of an iteration. ``step`` counts iterations from 1 and sets the learning
    rate.
    """
    actor = ctx.config.actor_rollout_ref.actor
    lr = scheduled_lr(ctx, step)
    done: list[Update] = []
    for mini in mini_batches(ctx, batch, step):
        max_norm = actor.grad_clip
        if actor.grad_clip_adaptive:
            max_norm = adaptive_clip(actor.grad_clip, len(mini), actor.grad_clip_min_batch_size)
        done.append(
            update(ctx.engine, mini, ctx.objective, ctx.stowage, ctx.cost, lr=lr, max_norm=max_norm)
        )
        if (lowered := done[-1].lowered) is not None:
            ctx.lower_budgets(lowered)
    return done, update_metrics(ctx, done, lr=lr, max_norm=max_norm) | follow(ctx, step)


def scheduled_lr(ctx: Context, step: int) -> float:
    """The learning rate of iteration ``step`` (from 1)."""
    optim = ctx.config.actor_rollout_ref.actor.optim
    total = optim.total_training_steps or ctx.total_steps
    warmup = optim.lr_warmup_steps
    return learning_rate(
        step - 1,
        lr=optim.lr,
        kind=optim.lr_scheduler_type,
        warmup_steps=int(optim.lr_warmup_steps_ratio * total) if warmup is None else warmup,
        total_steps=total,
        min_lr_ratio=optim.min_lr_ratio,
    )


def update_metrics(
    ctx: Context, done: Sequence[Update], *, lr: float, max_norm: float
) -> dict[str, float]:
    """Metrics of an iteration's optimizer steps: sums over all, gradient norms and plans of the
    last.
    """
    sums = {name: sum(u.sums[name] for u in done) for name in ctx.objective.sums}
    norms = [u.grad_norm for u in done if u.applied]
    prefix = "actor" if ctx.is_rl else "train"
    metrics = ctx.objective.metrics(sums)
    if ctx.is_rl:
        metrics["actor/pg_loss"] = sums["pg_loss"] / len(done)
        metrics["actor/loss"] = sums["loss"] / len(done)
    metrics[f"{prefix}/grad_norm"] = sum(norms) / len(norms) if norms else float("nan")
    metrics[f"{prefix}/grad_clip"] = max_norm
    metrics[f"{prefix}/lr"] = lr
    metrics[f"{prefix}/skipped_steps"] = float(sum(not u.applied for u in done))
    metrics[f"{prefix}/optimizer_steps"] = float(len(done))
    if ctx.budgets is not None:
        metrics["batch/lowered_budget"] = float(min(ctx.budgets))
    return metrics
