"""The policy losses of ``actor.policy_loss.loss_mode``, by verl's names: one function each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.policy import MAX_LOG_RATIO, TokenLoss, clipped_loss, policy_sums
from trainer.algorithms.ragged import group_index, segment_count, segment_sum

LossMode = Literal["vanilla", "gspo", "cispo", "gpg", "clip_cov", "kl_cov", "geo_mean"]


@dataclass(frozen=True, kw_only=True)
class PolicyTokens:
    """The trained tokens of a micro-batch; tensors [targets]."""

    log_probs: Tensor
    """With gradient."""
    old_log_probs: Tensor
    """Of the policy that drew the tokens."""
    advantages: Tensor
    sequence: Tensor
    """int64: any label that the tokens of a sequence share; sequences are whole."""
    selected: Tensor | None = None
    """bool, clip_cov and kl_cov: the tokens that :func:`select_by_covariance` chose from the whole
    mini-batch.
    """


@dataclass(frozen=True, kw_only=True)
class PolicyLossSettings:
    """``actor.clip_ratio*`` and ``actor.policy_loss``."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1


PolicyLoss = Callable[[PolicyTokens, PolicyLossSettings], TokenLoss]


def vanilla(tokens: PolicyTokens, settings: PolicyLossSettings) -> TokenLoss:
    """PPO's clipped loss with the dual clip: see :func:`clipped_loss`."""
    return clipped_loss(
        log_ratio(tokens),
        tokens.advantages,
        low=settings.clip_ratio_low,
        high=settings.clip_ratio_high,
        dual=settings.clip_ratio_c,
    )


def gspo(tokens: PolicyTokens, settings: PolicyLossSettings) -> TokenLoss:
    """GSPO (arXiv 2507.18071, equations 5 to 7): the ratio of a sequence is the geometric mean of
    those of its tokens, clipped as a whole.

    The form by tokens of its equations 13 and 14: the value of the sequence's ratio, with the
    gradient of each token's own log-prob, so that with equal advantages in a sequence and
    ``seq-mean-token-mean`` both are the same.
    """
    own = tokens.log_probs.float()
    mean = _sequence_mean(log_ratio(tokens).detach(), tokens.sequence)
    return clipped_loss(
        own - own.detach() + mean,
        tokens.advantages,
        low=settings.clip_ratio_low,
        high=settings.clip_ratio_high,
    )


def cispo(tokens: PolicyTokens, settings: PolicyLossSettings) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5): the clipped ratio is a weight
    without gradient of REINFORCE's loss, so that every token keeps its gradient.
    """
    ratio = log_ratio(tokens).detach().exp()
    weight = ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high)
    losses = -weight * tokens.advantages.float() * tokens.log_probs.float()
    return TokenLoss(losses, policy_sums(log_ratio(tokens), ratio, clipped=weight != ratio))


def gpg(tokens: PolicyTokens, settings: PolicyLossSettings) -> TokenLoss:
    """GPG (arXiv 2504.02546, equation 7): REINFORCE's -A log-prob, with neither ratio nor clip."""
    ratio = log_ratio(tokens).detach().exp()
    losses = -tokens.advantages.float() * tokens.log_probs.float()
    return TokenLoss(losses, policy_sums(log_ratio(tokens), ratio))


def clip_cov(tokens: PolicyTokens, settings: PolicyLossSettings) -> TokenLoss:
    """Clip-Cov (arXiv 2505.22617, equation 12): PPO's clipped loss, 0 on the selected tokens."""
    out = clipped_loss(
        log_ratio(tokens),
        tokens.advantages,
        low=settings.clip_ratio_low,
        high=settings.clip_ratio_high,
    )
    selected = _selected(tokens)
    sums = {**out.sums, "cov_selected": selected.sum().double()}
    return TokenLoss(torch.where(selected, 0.0, out.losses), sums)


def kl_cov(tokens: PolicyTokens, settings: PolicyLossSettings) -> TokenLoss:
    """KL-Cov (arXiv 2505.22617, equation 14): -A r without a clip, and on the selected tokens a
    penalty of ``ppo_kl_coef`` times |log r|, the distance from the policy that drew them.
    """
    distance = log_ratio(tokens)
    ratio = distance.exp()
    selected = _selected(tokens)
    penalty = torch.where(selected, settings.ppo_kl_coef * distance.abs(), 0.0)
    sums = policy_sums(distance, ratio.detach())
    sums["cov_selected"] = selected.sum().double()
    return TokenLoss(-tokens.advantages.float() * ratio + penalty, sums)


def geo_mean(tokens: PolicyTokens, settings: PolicyLossSettings) -> TokenLoss:
    """GMPO (arXiv 2507.20673, equation 4): -A times the geometric mean over a sequence of the
    clipped ratios, at each token of the sequence. ``clip_ratio_low`` and ``clip_ratio_high`` bound
    the *log*-ratio: e^-low to e^high.

    The advantage of a sequence is the mean of those of its tokens. ``seq-mean-token-mean`` makes it
    the paper's mean over sequences.
    """
    distance = log_ratio(tokens)
    sign = tokens.advantages.float().sign()
    held = distance.clamp(-settings.clip_ratio_low, settings.clip_ratio_high)
    pessimistic = torch.minimum(sign * distance, sign * held)
    ratio = _sequence_mean(sign * pessimistic, tokens.sequence).exp()
    advantages = _sequence_mean(tokens.advantages.float(), tokens.sequence)
    sums = policy_sums(distance, ratio.detach(), clipped=pessimistic < sign * distance)
    return TokenLoss(-advantages * ratio, sums)


POLICY_LOSSES: Mapping[LossMode, PolicyLoss] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
}
BY_SEQUENCE: tuple[LossMode, ...] = ("gspo", "geo_mean")
"""Losses that their papers average over sequences."""
BY_COVARIANCE: tuple[LossMode, ...] = ("clip_cov", "kl_cov")
"""Losses that treat tokens apart that were selected from the whole mini-batch."""


def select_by_covariance(
    mode: LossMode,
    settings: PolicyLossSettings,
    *,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    draws: Tensor | None = None,
) -> Tensor:
    """The tokens that clip_cov or kl_cov treats apart: bool [tokens], of a whole mini-batch.

    All [tokens]; ``mask`` bool: the N trained ones. The covariance of a token (arXiv 2505.22617,
    equation 10) is (log-prob - mean log-prob) (advantage - mean advantage), means over all trained
    tokens, log-probs of the policy that drew them. kl_cov takes the largest: a share
    ``kl_cov_ratio`` of N (equation 13). clip_cov draws a share ``clip_cov_ratio`` of N from those
    between ``clip_cov_lb`` and ``clip_cov_ub`` (equation 11): the smallest ``draws``, uniform
    numbers. Both take at least one token, as verl does, where there is one.
    """
    trained = mask.bool().nonzero().squeeze(1)
    selected = torch.zeros(mask.shape, dtype=torch.bool, device=mask.device)
    if not trained.numel():
        return selected
    log_probs = old_log_probs[trained].double()
    weights = advantages[trained].double()
    covariance = (log_probs - log_probs.mean()) * (weights - weights.mean())
    if mode == "kl_cov":
        count = max(int(settings.kl_cov_ratio * trained.numel()), 1)
        order = covariance.argsort(descending=True, stable=True)
    else:
        if draws is None:
            raise ValueError("clip_cov needs draws, one number for each token")
        count = max(int(settings.clip_cov_ratio * trained.numel()), 1)
        between = (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
        candidates = between.nonzero().squeeze(1)
        order = candidates[draws[trained[candidates]].argsort(stable=True)]
    selected[trained[order[:count]]] = True
    return selected


def log_ratio(tokens: PolicyTokens) -> Tensor:
    """New minus old log-prob, within +-20: float32 [targets]."""
    difference = tokens.log_probs.float() - tokens.old_log_probs.float()
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _selected(tokens: PolicyTokens) -> Tensor:
    if tokens.selected is None:
        raise ValueError("the tokens of clip_cov and kl_cov are selected from the mini-batch")
    return tokens.selected


def _sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Mean over the targets of each sequence, at every target: [targets]."""
    index, n = group_index(sequence)
    return (segment_sum(values, index, n) / segment_count(index, n).clamp(min=1))[index]
