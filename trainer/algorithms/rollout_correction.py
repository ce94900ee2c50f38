"""Correction for the policy that sampled: the engine that draws tokens and the trainer that learns
from them don't agree to the last bit, and stale samples come from older weights.

With r = pi_old / pi_rollout of a token, pi_old being the policy at the beginning of the step in the
trainer's own arithmetic and pi_rollout the engine's probability of the token that it drew, a loss
weighted by r (or by a sequence's product of r) is that of on-policy samples in the mean. Truncation
bounds its variance (Ionides 2008, "Truncated importance sampling"), and rejection leaves out
what is too far away. Flat values [tokens] in, flat values out; computed in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.ragged import segment_count, segment_sum

ImportanceLevel = Literal["token", "sequence"]
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
MAX_LOG_RATIO = 20.0
"""exp(20) is large yet far from overflow."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The trained tokens of a step, of whole sequences."""

    old_log_probs: Tensor
    """Of the trainer, before the step's first update: [tokens]."""
    rollout_log_probs: Tensor
    """Of the engine that drew the tokens: [tokens]."""
    mask: Tensor
    """True for trained tokens: bool [tokens]."""
    sequence: Tensor
    """The sequence of each token: int64 [tokens]."""
    sequences: int

    @property
    def log_ratio(self) -> Tensor:
        """log r, 0 outside of the mask: float64 [tokens]."""
        ratio = self.old_log_probs.double() - self.rollout_log_probs.double()
        return torch.where(self.mask, ratio, torch.zeros_like(ratio))

    def sums(self, values: Tensor) -> Tensor:
        """Sums over each sequence's trained tokens: [sequences]."""
        values = torch.where(self.mask, values, torch.zeros_like(values))
        return segment_sum(values, self.sequence, self.sequences)

    @property
    def counts(self) -> Tensor:
        """Trained tokens of each sequence: int64 [sequences]."""
        return segment_count(self.sequence[self.mask], self.sequences)


def importance_weights(
    samples: Samples, level: ImportanceLevel, *, threshold: float, batch_normalize: bool = False
) -> Tensor:
    """Weight of each token's policy loss: float32 [tokens], 1 outside of the mask.

    token: min(r, ``threshold``); sequence: the same of the product of r over the sequence.
    ``batch_normalize`` divides by the mean over the step's trained tokens, or over its sequences.
    """
    log_ratio = samples.log_ratio
    if level == "token":
        weights = _exp(log_ratio).clamp(max=threshold)
        mean = weights[samples.mask].mean()
    else:
        of_sequence = _exp(samples.sums(log_ratio)).clamp(max=threshold)
        weights = of_sequence[samples.sequence]
        mean = of_sequence[samples.counts > 0].mean()
    if batch_normalize and bool(samples.mask.any()):
        weights = weights / mean
    return torch.where(samples.mask, weights, torch.ones_like(weights)).float()


def kept_tokens(samples: Samples, rejection: Rejection, *, lower: float, upper: float) -> Tensor:
    """Whether a token is trained on: bool [tokens], True outside of the mask.

    ``token_k1`` keeps tokens with ``lower`` <= 1/r <= ``upper``, 1/r being pi_rollout / pi_old as
    in verl, the others those whose k2 = (log r)^2 / 2 or k3 = r - 1 - log r
    (http://joschu.net/blog/kl-approx) is at most ``upper``. ``seq_sum``, ``seq_mean`` and
    ``seq_max`` take the sum of k1 = -log r, k2 or k3 over a sequence, its mean (for k1 the
    geometric mean of 1/r) or its largest, and keep or leave out the sequence.
    """
    level, _, estimator = rejection.rpartition("_")
    values = _estimates(samples.log_ratio, estimator)
    if level == "token":
        inside = _is_inside(values, estimator, lower, upper)
    else:
        of_sequence = _by_sequence(samples, values, level)
        inside = _is_inside(of_sequence, estimator, lower, upper)[samples.sequence]
    return inside | ~samples.mask


def off_policy_metrics(samples: Samples) -> dict[str, float]:
    """How far the trainer's policy is from the one that sampled, under verl's names.

    ``kl`` and ``k3_kl``: estimates of KL(pi_rollout || pi_old), nats per token; ``training_ppl``
    and ``rollout_ppl``: mean perplexity of a sequence under both, ``log_ppl_diff`` the mean
    difference of their logarithms; ``chi2_token``, ``chi2_seq``: E[r^2] - 1.
    """
    trained = samples.counts > 0
    if not bool(trained.any()):
        return {}
    log_ratio = samples.log_ratio
    of_tokens = log_ratio[samples.mask]
    counts = samples.counts[trained].double()
    old = -samples.sums(samples.old_log_probs.double())[trained] / counts
    rollout = -samples.sums(samples.rollout_log_probs.double())[trained] / counts
    squares = _exp(2.0 * of_tokens)
    of_sequences = _exp(2.0 * samples.sums(log_ratio)[trained])
    metrics = {
        "kl": -of_tokens.mean(),
        "k3_kl": _estimates(of_tokens, "k3").mean(),
        "training_ppl": old.exp().mean(),
        "rollout_ppl": rollout.exp().mean(),
        "log_ppl_diff": (rollout - old).mean(),
        "log_ppl_abs_diff": (rollout - old).abs().mean(),
        "chi2_token": squares.mean() - 1.0,
        "chi2_seq": of_sequences.mean() - 1.0,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in metrics.items()}


def weight_metrics(samples: Samples, weights: Tensor) -> dict[str, float]:
    """Mean, extremes and effective sample size, (sum w)^2 / (n sum w^2), of the weights."""
    trained = weights[samples.mask].double()
    if not trained.numel():
        return {}
    metrics = {
        "mean": trained.mean(),
        "max": trained.max(),
        "min": trained.min(),
        "eff_sample_size": trained.sum().square() / (trained.numel() * trained.square().sum()),
    }
    return {f"rollout_corr/rollout_is_{name}": float(value) for name, value in metrics.items()}


def rejection_metrics(samples: Samples, kept: Tensor) -> dict[str, float]:
    """Shares of trained tokens, and of sequences with any of them, that are left out."""
    trained = samples.counts > 0
    if not bool(trained.any()):
        return {}
    rejected = (~kept).double()
    sequences = samples.sums(rejected)[trained] > 0
    return {
        "rollout_corr/rollout_rs_masked_fraction": float(rejected[samples.mask].mean()),
        "rollout_corr/rollout_rs_seq_masked_fraction": float(sequences.double().mean()),
    }


def _estimates(log_ratio: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return _exp(log_ratio) - 1.0 - log_ratio


def _by_sequence(samples: Samples, values: Tensor, level: str) -> Tensor:
    if level == "seq_max":
        lowest = values.new_zeros(samples.sequences)
        return lowest.scatter_reduce_(
            0, samples.sequence[samples.mask], values[samples.mask], "amax"
        )
    sums = samples.sums(values)
    return sums if level == "seq_sum" else sums / samples.counts.clamp(min=1)


def _is_inside(values: Tensor, estimator: str, lower: float, upper: float) -> Tensor:
    if estimator != "k1":
        return values <= upper
    ratio = _exp(values)
    return (ratio >= lower) & (ratio <= upper)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
