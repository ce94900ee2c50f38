"""All optimizer steps of a training step: mini-batches, learning rate, clipping, metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from trainer.algorithms import learning_rate
from trainer.batching import adaptive_clip
from trainer.config.schema import CriticOptim, Optim
from trainer.data import Batch
from trainer.run.context import RunContext
from trainer.run.reference import update_reference
from trainer.run.schedule_notes import schedule_notes
from trainer.tracking.banner import versions
from trainer.update.losses import PolicyObjective, SftObjective
from trainer.update.optimizer_step import OptimizerStep, take_step
from trainer.update.value_objective import ValueObjective

TOTAL_STEPS = "total_steps"
"""Field of a manifest's ``about``."""


def update_policy(
    ctx: RunContext, batch: Batch, step: int
) -> tuple[list[OptimizerStep], dict[str, float]]:
    """Take the optimizer steps of training step ``step`` (from 1), which sets the learning rate."""
    actor = ctx.config.actor_rollout_ref.actor
    lr = scheduled_lr(actor.optim, step, ctx.total_steps)
    max_norm = actor.grad_clip
    optimizer_steps: list[OptimizerStep] = []
    for mini_batch in mini_batches(ctx, batch, step):
        if actor.grad_clip_adaptive:
            max_norm = adaptive_clip(
                actor.grad_clip, len(mini_batch), actor.grad_clip_min_batch_size
            )
        result = take_step(
            ctx.engine,
            mini_batch,
            ctx.objective,
            ctx.update_pass,
            ctx.cost_model,
            lr=lr,
            max_norm=max_norm,
        )
        optimizer_steps.append(result)
        if result.lowered_budgets is not None:
            ctx.lower_budgets(result.lowered_budgets)
    prefix = "train"
    if ctx.is_rl:
        prefix = "actor"
    metrics = update_metrics(prefix, ctx.objective, optimizer_steps, lr=lr, max_norm=max_norm)
    if ctx.lowered_budgets is not None:
        metrics["batch/lowered_budget"] = float(min(ctx.lowered_budgets))
    return optimizer_steps, metrics | update_reference(ctx, step)


def mini_batches(ctx: RunContext, batch: Batch, step: int) -> Iterator[Batch]:
    """The batch of each optimizer step: ``ppo_mini_batch_size`` prompts with all their responses,
    ``ppo_epochs`` times.

    Prompts come in the order of the batch, or with ``actor.shuffle`` in one drawn from (seed, step,
    epoch), as are the numbers by which clip_cov chooses tokens.
    """
    actor = ctx.config.actor_rollout_ref.actor
    for epoch in range(actor.ppo_epochs):
        generator = epoch_generator(ctx.config.trainer.seed, step, epoch)
        order = prompt_order(batch, generator, shuffle=actor.shuffle)
        if actor.policy_loss.loss_mode == "clip_cov":
            batch.columns["draws"] = torch.rand(batch.num_tokens, generator=generator)
        yield from split_prompts(batch, order, actor.ppo_mini_batch_size)


def epoch_generator(seed: int, step: int, epoch: int) -> torch.Generator:
    """Random numbers of one pass over the batch of a training step."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + epoch)


def prompt_order(batch: Batch, generator: torch.Generator, *, shuffle: bool) -> Tensor:
    """The groups of ``batch`` ``[prompts]`` as they come, or shuffled."""
    groups: Tensor = torch.unique(batch.rows["groups"])
    if not shuffle:
        return groups
    shuffled: Tensor = groups[torch.randperm(len(groups), generator=generator)]
    return shuffled


def split_prompts(batch: Batch, order: Tensor, size: int) -> Iterator[Batch]:
    """Batches of ``size`` prompts with all their responses, by the groups ``order``
    ``[prompts]``.
    """
    for selected in torch.split(order, size):
        yield batch.select(torch.isin(batch.rows["groups"], selected).nonzero().squeeze(-1))


def scheduled_lr(optim: Optim | CriticOptim, step: int, run_steps: int) -> float:
    """The learning rate of training step ``step`` (from 1) of a run of ``run_steps``."""
    total = optim.total_training_steps or run_steps
    warmup_steps = optim.lr_warmup_steps
    if warmup_steps is None:
        warmup_steps = int(optim.lr_warmup_steps_ratio * total)
    return learning_rate(
        step - 1,
        lr=optim.lr,
        kind=optim.lr_scheduler_type,
        warmup_steps=warmup_steps,
        total_steps=total,
        min_lr_ratio=optim.min_lr_ratio,
    )


def about_run(ctx: RunContext) -> dict[str, object]:
    """What a checkpoint says of its run: versions, and its number of steps for ``lr_notes``."""
    return {TOTAL_STEPS: ctx.total_steps, **versions()}


def lr_notes(ctx: RunContext, restored_step: int, about: Mapping[str, object]) -> list[str]:
    """What becomes of the learning rate where the run's number of steps is not that of the restored
    checkpoint (its ``about``), which may lack it.
    """
    earlier_total = about.get(TOTAL_STEPS)
    optim = ctx.config.actor_rollout_ref.actor.optim
    return schedule_notes(
        optim,
        step=restored_step,
        before=earlier_total if isinstance(earlier_total, int) else None,
        now=ctx.total_steps,
        rate=partial(scheduled_lr, optim, run_steps=ctx.total_steps),
    )


def update_metrics(
    prefix: str,
    objective: PolicyObjective | SftObjective | ValueObjective,
    optimizer_steps: Sequence[OptimizerStep],
    *,
    lr: float,
    max_norm: float,
) -> dict[str, float]:
    """Metrics of a training step's optimizer steps: the objective's over all of them, the mean
    gradient norm of those applied.
    """
    sums = {name: sum(step.sums[name] for step in optimizer_steps) for name in objective.sum_names}
    norms = [step.grad_norm for step in optimizer_steps if step.applied]
    skipped = len(optimizer_steps) - len(norms)
    metrics = objective.metrics(sums, len(optimizer_steps))
    metrics[f"{prefix}/grad_norm"] = sum(norms) / len(norms) if norms else float("nan")
    metrics[f"{prefix}/grad_clip"] = max_norm
    metrics[f"{prefix}/lr"] = lr
    metrics[f"{prefix}/skipped_steps"] = float(skipped)
    metrics[f"{prefix}/optimizer_steps"] = float(len(optimizer_steps))
    return metrics
