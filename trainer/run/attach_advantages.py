"""Advantages of a batch, with the KL penalty in the reward where the settings ask for it."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms import compute_advantages, is_clamped, kl_estimate, sequence_index
from trainer.data import Batch
from trainer.run.context import RunContext


def attach_advantages(ctx: RunContext, batch: Batch) -> dict[str, float]:
    """Attach the column ``advantages`` ``[tokens]``, with a critic also ``returns``, and update the
    KL controller; metrics.
    """
    algorithm = ctx.config.algorithm
    mask = batch.columns["loss_mask"]
    metrics: dict[str, float] = {}
    kl = None
    if algorithm.use_kl_in_reward:
        kl = mask * kl_estimate(
            batch.columns["old_log_probs"], batch.columns["ref_log_probs"], algorithm.kl_penalty
        )
        mean_kl = float(kl[mask].mean()) if mask.any() else 0.0
        metrics["actor/reward_kl_penalty"] = mean_kl
        clamped = is_clamped(
            batch.columns["old_log_probs"], batch.columns["ref_log_probs"], algorithm.kl_penalty
        )
        metrics["actor/reward_kl_clamped"] = (
            float(clamped[mask].float().mean()) if mask.any() else 0.0
        )
        metrics["actor/reward_kl_penalty_coeff"] = ctx.kl_controller.coef
    result = compute_advantages(
        algorithm.adv_estimator,
        scores=batch.rows["rewards"],
        groups=batch.rows["groups"],
        mask=mask,
        sequence=sequence_index(batch.cu_seqlens),
        baselines=batch.rows.get("baselines"),
        values=batch.columns.get("values"),
        kl=kl,
        kl_coef=ctx.kl_controller.coef,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
    )
    if kl is not None:
        ctx.kl_controller.update(mean_kl, len(batch))
    batch.columns["advantages"] = result.advantages
    if ctx.critic is not None:
        batch.columns["returns"] = result.returns
        metrics |= value_metrics(batch.columns["values"][mask], result.returns[mask])
    trained = result.advantages[mask]
    if not trained.numel():  # every response was cut off, and masked for it
        trained = torch.zeros(1)
    metrics["critic/advantages/mean"] = float(trained.mean())
    metrics["critic/advantages/max"] = float(trained.max())
    metrics["critic/advantages/min"] = float(trained.min())
    return metrics


def value_metrics(values: Tensor, returns: Tensor) -> dict[str, float]:
    """``critic/values``, ``critic/returns`` and the explained variance, from those of the trained
    tokens [n].

    1 - Var(returns - values) / Var(returns), as verl: 1 where the critic knows the returns, 0 where
    it knows no more than their mean, below 0 where it is worse.
    """
    metrics: dict[str, float] = {}
    if not len(values):
        return metrics
    for name, column in (("values", values), ("returns", returns)):
        metrics[f"critic/{name}/mean"] = float(column.mean())
        metrics[f"critic/{name}/max"] = float(column.max())
        metrics[f"critic/{name}/min"] = float(column.min())
    if len(values) > 1:
        error = float((returns - values).double().var())
        spread = float(returns.double().var())
        metrics["critic/vf_explained_var"] = 1.0 - error / (spread + 1e-5)
    return metrics
