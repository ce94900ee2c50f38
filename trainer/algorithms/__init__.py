"""Advantages, losses, KL and schedules: pure functions on ragged tensors."""

from trainer.algorithms.advantages import Advantages, compute_advantages, grpo, rloo
from trainer.algorithms.aggregate import LossAggMode, aggregate, token_weights
from trainer.algorithms.finite import not_finite
from trainer.algorithms.kl import AdaptiveKl, FixedKl, KlController, kl_estimate, make_kl_controller
from trainer.algorithms.policy import (
    POLICY_SUMS,
    TokenLoss,
    add_terms,
    policy_loss,
    sft_loss,
    value_loss,
)
from trainer.algorithms.ragged import sequence_index
from trainer.algorithms.schedule import learning_rate

__all__ = [
    "POLICY_SUMS",
    "AdaptiveKl",
    "Advantages",
    "FixedKl",
    "KlController",
    "LossAggMode",
    "TokenLoss",
    "add_terms",
    "aggregate",
    "compute_advantages",
    "grpo",
    "kl_estimate",
    "learning_rate",
    "make_kl_controller",
    "not_finite",
    "policy_loss",
    "rloo",
    "sequence_index",
    "sft_loss",
    "token_weights",
    "value_loss",
]
