"""Advantage estimators on ragged batches: once per rollout, on the whole batch, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from trainer.algorithms.group_advantages import grpo, grpo_passk, opo, rloo
from trainer.algorithms.ragged import segment_count, segment_sum

Estimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
]


@dataclass(frozen=True)
class Advantages:
    """``advantages`` and ``returns`` float32 [tokens]; 0 on tokens that are not trained."""

    advantages: Tensor
    returns: Tensor


def token_rewards(
    scores: Tensor, mask: Tensor, sequence: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Rewards of tokens, float64 [tokens]: the score at a sequence's last trained token, minus
    ``kl_coef * kl`` at every trained one.

    ``scores`` [sequences]; ``mask`` bool [tokens]; ``sequence`` int64 [tokens], rising; ``kl``
    [tokens] in nats. A sequence without trained tokens has no token for its score,
    which is left out.
    """
    rewards = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
    trained = mask.nonzero().squeeze(1)
    trained_sequence = sequence[trained]
    is_last = torch.ones_like(trained_sequence, dtype=torch.bool)
    is_last[:-1] = trained_sequence[:-1] != trained_sequence[1:]
    rewards[trained[is_last]] = scores.double()[trained_sequence[is_last]]
    if kl is not None and kl_coef:
        rewards[trained] -= kl_coef * kl[trained].double()
    return rewards


def sequence_rewards(
    scores: Tensor, mask: Tensor, sequence: Tensor, kl: Tensor | None = None, kl_coef: float = 0.0
) -> Tensor:
    """Rewards of sequences, float64 [sequences]: the score minus ``kl_coef * kl`` of all trained
    tokens.

    Arguments as those of :func:`token_rewards`. The sum of token rewards would lose the score of a
    response without trained tokens, which is part of its group's baseline.
    """
    rewards = scores.double()
    if kl is None or not kl_coef:
        return rewards
    mask = mask.bool()
    return rewards - kl_coef * segment_sum(kl[mask].double(), sequence[mask], scores.numel())


def discounted(values: Tensor, sequence: Tensor, sequences: int, decay: float) -> Tensor:
    """Sum over k >= 0 of decay^k * values[t + k] within each sequence: float64 [n].

    ``values`` [n] are trained tokens only, sequence after sequence; ``sequence`` int64 [n], rising.
    One vector operation per position from the end, over all sequences that are that long, so that
    there is no padded copy.
    """
    out = values.double().clone()
    if not out.numel():
        return out
    counts = segment_count(sequence, sequences)
    ends = counts.cumsum(0) - 1
    order = torch.argsort(counts, descending=True, stable=True)
    counts = counts[order]
    ends = ends[order]
    # longer_than[k]: how many sequences have more than k trained tokens.
    longer_than = counts.numel() - torch.searchsorted(
        counts.flip(0), torch.arange(int(counts[0]), device=counts.device), right=True
    )
    for distance, n in enumerate(longer_than.tolist()[1:], start=1):
        positions = ends[:n] - distance
        out[positions] += decay * out[positions + 1]
    return out


def reinforce_plus_plus(
    rewards: Tensor, mask: Tensor, sequence: Tensor, sequences: int, *, gamma: float
) -> Advantages:
    """Discounted reward-to-go of each token, whitened over all trained tokens of the batch.

    arXiv 2501.03262. ``rewards`` float64 [tokens], ``mask`` bool [tokens], ``sequence`` int64
    [tokens].
    """
    mask = mask.bool()
    returns = discounted(rewards[mask], sequence[mask], sequences, gamma)
    return Advantages(_scatter(whiten(returns), mask), _scatter(returns, mask))


def reinforce_plus_plus_baseline(
    rewards: Tensor, groups: Tensor, mask: Tensor, sequence: Tensor
) -> Advantages:
    """Reward of a response minus the mean of its group, at each of its tokens, whitened over all
    trained tokens of the batch: REINFORCE++ with a baseline (arXiv 2501.03262, section 3.3).

    ``rewards`` float64 and ``groups`` int64 [sequences], ``mask`` bool and ``sequence`` int64
    [tokens].
    """
    mask = mask.bool()
    flat = _scatter(whiten(grpo(rewards, groups, norm_by_std=False).double()[sequence[mask]]), mask)
    return Advantages(flat, flat.clone())


def remax(
    rewards: Tensor, baselines: Tensor, mask: Tensor, sequence: Tensor, sequences: int
) -> Advantages:
    """Reward-to-go of each token minus the reward of the prompt's greedy response (ReMax, arXiv
    2310.10505, equation 5).

    ``rewards`` float64 [tokens], ``baselines`` [sequences], ``mask`` bool [tokens], ``sequence``
    int64 [tokens].
    """
    mask = mask.bool()
    returns = discounted(rewards[mask], sequence[mask], sequences, 1.0)
    advantages = returns - baselines.double()[sequence[mask]]
    return Advantages(_scatter(advantages, mask), _scatter(returns, mask))


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence: Tensor,
    sequences: int,
    *,
    gamma: float,
    lam: float,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16), whitened over all trained
    tokens of the batch.

    ``values`` [tokens]: the critic's value of the state in which each token was chosen. After a
    sequence's last trained token the value is 0. Tokens between trained ones (a tool's answer) take
    no step. ``returns`` are the unwhitened advantages plus ``values``.
    """
    mask = mask.bool()
    trained_sequence = sequence[mask]
    value = values[mask].double()
    next_value = torch.zeros_like(value)
    same_sequence = trained_sequence[:-1] == trained_sequence[1:]
    next_value[:-1] = torch.where(same_sequence, value[1:], 0.0)
    errors = rewards[mask].double() + gamma * next_value - value
    raw = discounted(errors, trained_sequence, sequences, gamma * lam)
    return Advantages(_scatter(whiten(raw), mask), _scatter(raw + value, mask))


def whiten(values: Tensor) -> Tensor:
    """``values`` [n] shifted and scaled to mean 0 and variance 1 (unbiased, + 1e-8): [n].

    Fewer than two values are returned unchanged.
    """
    if values.numel() < 2:
        return values
    return (values - values.mean()) * torch.rsqrt(values.var() + 1e-8)


def compute_advantages(
    estimator: Estimator,
    *,
    scores: Tensor,
    groups: Tensor,
    mask: Tensor,
    sequence: Tensor,
    values: Tensor | None = None,
    baselines: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
    norm_adv_by_std_in_grpo: bool = True,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> Advantages:
    """Advantages of a whole rollout batch, ready to be its columns ``advantages`` and ``returns``.

    ``scores`` [sequences] (the batch's ``rewards``), ``groups`` int64 [sequences], ``mask`` bool
    [tokens] (the batch's ``loss_mask``), ``sequence`` int64 [tokens] (from :func:`sequence_index`),
    ``values`` [tokens] for gae, ``baselines`` [sequences] for remax. With ``kl`` [tokens] those
    that compare responses of a group take the scores minus the weighted KL of the sequence.

    Raises ValueError for an unknown ``estimator``, gae without ``values`` and remax without
    ``baselines``.
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"adv_estimator {estimator!r} is none of {', '.join(get_args(Estimator))}")
    sequences = scores.numel()
    mask = mask.bool()
    rewards = token_rewards(scores, mask, sequence, kl, kl_coef)
    if estimator == "reinforce_plus_plus":
        return reinforce_plus_plus(rewards, mask, sequence, sequences, gamma=gamma)
    if estimator == "gae":
        if values is None:
            raise ValueError("gae needs values, which a critic gives")
        return gae(rewards, values, mask, sequence, sequences, gamma=gamma, lam=lam)
    if estimator == "remax":
        if baselines is None:
            raise ValueError("remax needs baselines, the rewards of greedy responses")
        return remax(rewards, baselines, mask, sequence, sequences)
    totals = sequence_rewards(scores, mask, sequence, kl, kl_coef)
    if estimator == "reinforce_plus_plus_baseline":
        return reinforce_plus_plus_baseline(totals, groups, mask, sequence)
    if estimator == "grpo":
        per_sequence = grpo(totals, groups, norm_by_std=norm_adv_by_std_in_grpo)
    elif estimator == "grpo_passk":
        per_sequence = grpo_passk(totals, groups, norm_by_std=norm_adv_by_std_in_grpo)
    elif estimator == "opo":
        per_sequence = opo(totals, groups, segment_count(sequence[mask], sequences))
    else:
        per_sequence = rloo(totals, groups)
    flat = torch.where(mask, per_sequence[sequence], 0.0)
    return Advantages(flat, flat.clone())


def _scatter(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` [n] of the trained tokens at their positions, 0 elsewhere: float32 [tokens]."""
    out = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    out[mask] = values.float()
    return out
