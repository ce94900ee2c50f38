"""Losses per token of the policy and of the critic; ``aggregate`` weighs them in a step's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.ragged import segment_count, segment_sum

MAX_LOG_RATIO = 20.0
"""exp(20) is large yet far from overflow; only an update that went wrong has a larger ratio."""

POLICY_SUMS = ("tokens", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "ratio")
"""Names of :attr:`TokenLoss.sums` of :func:`policy_loss`."""


@dataclass(frozen=True)
class TokenLoss:
    """``losses`` float32 [targets]; ``sums`` float64 scalars without gradient, each a sum over the
    targets.

    Sums add up exactly over micro-batches and ranks; divided by ``tokens`` they are means.
    """

    losses: Tensor
    sums: dict[str, Tensor]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    sequence_level: bool = False,
    sequence: Tensor | None = None,
) -> TokenLoss:
    """PPO's clipped loss (arXiv 1707.06347, equation 7) with separate bounds and the dual clip
    (arXiv 1912.09729): float32 [targets].

    ``log_probs``, ``old_log_probs``, ``advantages`` [targets] of trained tokens. With r = exp(new -
    old), the log-ratio clamped to +-20: max(-A r, -A clip(r, 1 - low, 1 + high)), and where A < 0
    at most -A c.

    ``sequence_level`` is GSPO (arXiv 2507.18071, equations 7 and 14): r becomes the geometric mean
    of the ratios of the token's sequence, with the gradient of each token's own log-prob. It needs
    ``sequence`` int64 [targets], any labels that rise or repeat, and whole sequences. Its paper
    weighs tokens by ``seq-mean-token-mean``.

    Sums: ``pg_clipfrac`` (the upper clip is active), ``pg_clipfrac_lower`` (the dual clip is),
    ``ppo_kl`` (old - new log-probs), ``ratio``, ``tokens``.
    """
    log_probs = log_probs.float()
    advantages = advantages.float()
    log_ratio = (log_probs - old_log_probs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl_sum = -log_ratio.detach().double().sum()
    if sequence_level:
        if sequence is None:
            raise ValueError("a sequence-level ratio needs the sequence of each target")
        log_ratio = log_probs - log_probs.detach() + _sequence_mean(log_ratio.detach(), sequence)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    pessimistic = torch.maximum(plain, clipped)
    bound = -advantages * clip_ratio_c
    negative = advantages < 0
    losses = torch.where(negative, torch.minimum(pessimistic, bound), pessimistic)
    sums = {
        "tokens": kl_sum.new_tensor(log_probs.numel()),
        "pg_clipfrac": (clipped > plain).sum().double(),
        "pg_clipfrac_lower": (negative & (pessimistic > bound)).sum().double(),
        "ppo_kl": kl_sum,
        "ratio": ratio.detach().double().sum(),
    }
    return TokenLoss(losses, sums)


def sft_loss(log_probs: Tensor) -> TokenLoss:
    """Negative log-likelihood in nats: float32 [targets], of ``log_probs`` [targets].

    Sums: ``tokens``, ``nll``.
    """
    losses = -log_probs.float()
    nll = losses.detach().double().sum()
    return TokenLoss(losses, {"tokens": nll.new_tensor(losses.numel()), "nll": nll})


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float = 0.5
) -> TokenLoss:
    """The critic's clipped squared error, halved (arXiv 2005.12729, section 3): float32 [targets].

    ``values``, ``old_values``, ``returns`` [targets]. Sums: ``tokens``, ``vf_clipfrac``,
    ``vf_error`` (squared).
    """
    values = values.float()
    old_values = old_values.float()
    returns = returns.float()
    near_old = old_values + (values - old_values).clamp(-clip_range, clip_range)
    plain = (values - returns).square()
    clipped = (near_old - returns).square()
    sums = {
        "vf_clipfrac": (clipped > plain).sum().double(),
        "vf_error": plain.detach().double().sum(),
    }
    sums["tokens"] = sums["vf_error"].new_tensor(values.numel())
    return TokenLoss(0.5 * torch.maximum(plain, clipped), sums)


def add_terms(
    losses: Tensor,
    *,
    entropy: Tensor | None = None,
    entropy_coeff: float = 0.0,
    kl: Tensor | None = None,
    kl_loss_coef: float = 0.0,
) -> Tensor:
    """``losses - entropy_coeff * entropy + kl_loss_coef * kl``: float32 [targets], of [targets].

    A term whose coefficient is 0 is left out, so that what is not finite in it can't turn the loss
    into NaN.
    """
    if entropy is not None and entropy_coeff:
        losses = losses - entropy_coeff * entropy.float()
    if kl is not None and kl_loss_coef:
        losses = losses + kl_loss_coef * kl.float()
    return losses


def _sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Mean over the targets of each sequence, at every target: [targets]."""
    labels, index = torch.unique(sequence, return_inverse=True)
    n = labels.numel()
    return (segment_sum(values, index, n) / segment_count(index, n).clamp(min=1))[index]
