"""The critic in a training step: values before the update, and its own optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from trainer.data import Batch
from trainer.models import Packed, target_values
from trainer.run.context import RunContext
from trainer.run.critic import Critic
from trainer.run.policy_update import (
    epoch_generator,
    prompt_order,
    scheduled_lr,
    split_prompts,
    update_metrics,
)
from trainer.update.forward import target_column
from trainer.update.micro_batches import plan_micro_batches
from trainer.update.optimizer_step import OptimizerStep, take_step


def attach_values(ctx: RunContext, batch: Batch) -> None:
    """Attach ``values`` ``[tokens]``: the critic's value of the state in which each trained token
    was chosen. Nothing without a critic. Collective.
    """
    critic = ctx.critic
    if critic is None:
        return

    def values(packed: Packed) -> Tensor:
        return target_values(critic.engine.module, packed)

    with ctx.timers("values"):
        plan = plan_micro_batches(batch, critic.forward_pass, ctx.world.size, critic.cost_model)
        batch.columns["values"] = target_column(values, batch, plan, ctx.world, critic.forward_pass)


def update_critic(ctx: RunContext, critic: Critic, batch: Batch, step: int) -> dict[str, float]:
    """Take the critic's optimizer steps of training step ``step`` (from 1). Returns its metrics."""
    section = ctx.config.critic
    lr = scheduled_lr(section.optim, step, ctx.total_steps)
    optimizer_steps: list[OptimizerStep] = []
    with ctx.timers("update_critic"):
        for mini_batch in _mini_batches(ctx, batch, step):
            result = take_step(
                critic.engine,
                mini_batch,
                critic.objective,
                critic.update_pass,
                critic.cost_model,
                lr=lr,
                max_norm=section.grad_clip,
            )
            optimizer_steps.append(result)
            if result.lowered_budgets is not None:
                critic.lower_budgets(result.lowered_budgets)
    metrics = update_metrics(
        "critic", critic.objective, optimizer_steps, lr=lr, max_norm=section.grad_clip
    )
    if critic.lowered_budgets is not None:
        metrics["batch/lowered_critic_budget"] = float(min(critic.lowered_budgets))
    return metrics


def _mini_batches(ctx: RunContext, batch: Batch, step: int) -> Iterator[Batch]:
    """``critic.ppo_mini_batch_size`` prompts with all their responses, ``critic.ppo_epochs``
    times.
    """
    section = ctx.config.critic
    for epoch in range(section.ppo_epochs):
        generator = epoch_generator(ctx.config.trainer.seed, step, epoch)
        order = prompt_order(batch, generator, shuffle=section.shuffle)
        yield from split_prompts(batch, order, section.ppo_mini_batch_size)
