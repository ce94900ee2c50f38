"""What the losses per token share, PPO's clip, and the losses of SFT and of the critic;
``loss_modes`` has those of the policy, ``aggregate`` weighs them in a step's loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is large yet far from overflow; only an update that went wrong has a larger ratio."""

POLICY_SUMS = (
    "tokens",
    "pg_clipfrac",
    "pg_clipfrac_lower",
    "ppo_kl",
    "ratio",
    "cov_selected",
)
"""Names of :attr:`TokenLoss.sums` of every policy loss."""


@dataclass(frozen=True)
class TokenLoss:
    """``losses`` float32 [targets]; ``sums`` float64 scalars without gradient, each a sum over the
    targets.

    Sums add up exactly over micro-batches and ranks; divided by ``tokens`` they are means.
    """

    losses: Tensor
    sums: dict[str, Tensor]


def clipped_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    dual: float | None = None,
) -> TokenLoss:
    """PPO's clipped loss (arXiv 1707.06347, equation 7) with separate bounds and, with ``dual``,
    the dual clip (arXiv 1912.09729, equation 5): float32 [targets].

    With r = exp(``log_ratio``), ``log_ratio`` and ``advantages`` [targets]: max(-A r, -A clip(r,
    1 - low, 1 + high)), and where A < 0 at most -A dual.
    """
    advantages = advantages.float()
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    held = -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    losses = torch.maximum(plain, held)
    bounded = torch.zeros_like(losses, dtype=torch.bool)
    if dual is not None:
        bound = -advantages * dual
        bounded = (advantages < 0) & (losses > bound)
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)
    sums = policy_sums(log_ratio, ratio.detach(), clipped=held > plain, bounded=bounded)
    return TokenLoss(losses, sums)


def policy_sums(
    log_ratio: Tensor,
    ratio: Tensor,
    *,
    clipped: Tensor | None = None,
    bounded: Tensor | None = None,
) -> dict[str, Tensor]:
    """The sums of a policy loss, with the names of ``POLICY_SUMS``, from values [targets].

    ``pg_clipfrac``: tokens ``clipped``, ``pg_clipfrac_lower``: those ``bounded`` by the dual clip;
    0 where a loss has no such thing. ``ppo_kl``: old - new log-probs. ``cov_selected``: a loss that
    selects tokens by their covariance puts their number here.
    """
    kl = -log_ratio.detach().double().sum()
    nothing = kl.new_zeros(())
    return {
        "tokens": kl.new_tensor(log_ratio.numel()),
        "pg_clipfrac": nothing if clipped is None else clipped.sum().double(),
        "pg_clipfrac_lower": nothing if bounded is None else bounded.sum().double(),
        "ppo_kl": kl,
        "ratio": ratio.detach().double().sum(),
        "cov_selected": nothing,
    }


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

    ``values``, ``old_values``, ``returns`` [targets]. Sums: ``tokens``, ``vf_clipfrac``.
    """
    values = values.float()
    old_values = old_values.float()
    returns = returns.float()
    near_old = values.clamp(old_values - clip_range, old_values + clip_range)
    plain = (values - returns).square()
    clipped = (near_old - returns).square()
    sums = {
        "vf_clipfrac": (clipped > plain).sum().double(),
        "tokens": torch.tensor(values.numel(), dtype=torch.float64),
    }
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
