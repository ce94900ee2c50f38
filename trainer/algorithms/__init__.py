"""Advantages, losses, KL and learning rate: pure functions on ragged tensors.

Read ``ragged`` (sums over the sequences of flat values), ``advantages``, ``kl``, ``policy`` (losses
per token: where the ratio is clipped), ``aggregate`` (how token losses become the loss of a step)
and ``learning_rate`` (its schedule).
"""

from trainer.algorithms.advantages import Advantages, compute_advantages, grpo, rloo
from trainer.algorithms.aggregate import LossAggMode, aggregate, token_weights
from trainer.algorithms.kl import AdaptiveKl, FixedKl, KlController, kl_estimate, make_kl_controller
from trainer.algorithms.learning_rate import learning_rate
from trainer.algorithms.policy import (
    POLICY_SUMS,
    TokenLoss,
    add_terms,
    policy_loss,
    sft_loss,
    value_loss,
)
from trainer.algorithms.ragged import sequence_index

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
    "policy_loss",
    "rloo",
    "sequence_index",
    "sft_loss",
    "token_weights",
    "value_loss",
]
