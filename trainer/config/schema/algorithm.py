"""``algorithm.*``, ``critic.*``, ``reward_model.*``, ``custom_reward_function.*``: what is learnt
from.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from trainer.config.schema.base import (
    Budget,
    Count,
    NonNegative,
    Positive,
    Section,
    Share,
    Text,
    Whole,
)


def _kl_type(value: object) -> object:
    """``kl_controller`` is an old name of the adaptive controller."""
    return "adaptive" if value == "kl_controller" else value


class KlCtrl(Section):
    """``algorithm.kl_ctrl``: weight of the KL in the reward."""

    type: Annotated[Literal["fixed", "adaptive"], BeforeValidator(_kl_type)]
    """Constant, or steered towards ``target_kl`` (arXiv 1909.08593, section 2.2)."""
    kl_coef: NonNegative
    """The weight, or where it begins."""
    target_kl: Positive
    """KL that the adaptive controller aims at, nats per token."""
    horizon: Count
    """Sequences over which the adaptive controller moves the weight."""


class Algorithm(Section):
    """``algorithm``."""

    adv_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "gae"]
    """Estimator of the advantages."""
    max_staleness: Whole
    """Most iterations by which the weights that began a response may lag those it trains. 0:
    strictly on-policy.
    """
    norm_adv_by_std_in_grpo: bool
    """grpo: divide a group's advantages by their standard deviation. false: Dr.GRPO (arXiv
    2503.20783).
    """
    gamma: Share
    """Discount of a token's future reward (reinforce_plus_plus, gae)."""
    lam: Share
    """GAE's lambda."""
    use_kl_in_reward: bool
    """Subtract the KL to the reference from the reward of each token."""
    kl_penalty: Literal["k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs"]
    """Estimator of that KL."""
    kl_ctrl: KlCtrl


class Critic(Section):
    """``critic``: the value model."""

    enable: bool | None
    """null: when ``algorithm.adv_estimator`` needs one. Not built yet: true is an error, the other
    keys have no effect.
    """
    use_dynamic_bsz: bool
    """Cut its micro-batches by tokens."""
    ppo_max_token_len_per_gpu: Budget
    """Most tokens of a micro-batch of a rank in training."""
    forward_max_token_len_per_gpu: Budget
    """The same, forward only."""
    ppo_micro_batch_size_per_gpu: Count | None
    """Sequences of a micro-batch when ``use_dynamic_bsz`` is false."""


class RewardModel(Section):
    """``reward_model``: a model that scores responses."""

    enable: bool
    """Score with a model. Not built yet: true is an error, the other keys have no effect."""
    use_dynamic_bsz: bool
    """Cut its micro-batches by tokens."""
    forward_max_token_len_per_gpu: Budget
    """Most tokens of a micro-batch of a rank."""
    micro_batch_size_per_gpu: Count | None
    """Sequences of a micro-batch when ``use_dynamic_bsz`` is false."""


class CustomRewardFunction(Section):
    """``custom_reward_function``: your own reward."""

    path: Text | None
    """Python file that defines it. null: the rule that fits the data."""
    name: Text
    """Function in that file: ``f(data_source, solution_str, ground_truth, extra_info) ->
    float``.
    """
