"""Advantages, losses, KL and learning rate: pure functions on ragged tensors.

Read ``ragged`` (sums over the sequences of flat values), ``advantages`` and ``group_advantages``,
``kl``, ``policy`` and ``loss_modes`` (losses per token), ``aggregate`` (how token losses become the
loss of a step) and ``learning_rate`` (its schedule).
"""

from trainer.algorithms.advantages import Advantages, compute_advantages
from trainer.algorithms.aggregate import LossAggMode, aggregate, token_weights
from trainer.algorithms.group_advantages import grpo, rloo
from trainer.algorithms.kl import (
    AdaptiveKl,
    FixedKl,
    KlController,
    is_clamped,
    kl_estimate,
    kl_loss,
    make_kl_controller,
)
from trainer.algorithms.learning_rate import learning_rate
from trainer.algorithms.loss_modes import (
    BY_COVARIANCE,
    POLICY_LOSSES,
    PolicyLossSettings,
    PolicyTokens,
    select_by_covariance,
)
from trainer.algorithms.policy import (
    POLICY_SUMS,
    TokenLoss,
    add_terms,
    sft_loss,
    value_loss,
)
from trainer.algorithms.ragged import sequence_index

__all__ = [
    "BY_COVARIANCE",
    "POLICY_LOSSES",
    "POLICY_SUMS",
    "AdaptiveKl",
    "Advantages",
    "FixedKl",
    "KlController",
    "LossAggMode",
    "PolicyLossSettings",
    "PolicyTokens",
    "TokenLoss",
    "add_terms",
    "aggregate",
    "compute_advantages",
    "grpo",
    "is_clamped",
    "kl_estimate",
    "kl_loss",
    "learning_rate",
    "make_kl_controller",
    "rloo",
    "select_by_covariance",
    "sequence_index",
    "sft_loss",
    "token_weights",
    "value_loss",
]
