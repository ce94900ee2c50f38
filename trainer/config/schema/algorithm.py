"""``algorithm.*``, ``reward.*``, ``reward_model.*``, ``custom_reward_function.*``:
advantages and rewards.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from trainer.base.reward_rules import RuleName
from trainer.config.schema.base import (
    LARGEST,
    Budget,
    Count,
    NonNegative,
    Positive,
    Section,
    Share,
    Text,
    Whole,
)
from trainer.config.schema.markers import MAY_CHANGE, NOT_BUILT, RL_ONLY, USER_CODE, NoEffect

AdvEstimator = Literal[
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
]
BY_GROUP: tuple[AdvEstimator, ...] = (
    "grpo",
    "grpo_passk",
    "rloo",
    "opo",
    "reinforce_plus_plus_baseline",
)
"""Estimators that compare the responses of a prompt."""
_DISCOUNTING = ("reinforce_plus_plus", "gae")

NO_DISCOUNT = NoEffect(
    "algorithm.adv_estimator",
    tuple(name for name in get_args(AdvEstimator) if name not in _DISCOUNTING),
    "discounts nothing: set it to reinforce_plus_plus",
)
NO_LAMBDA = NoEffect(
    "algorithm.adv_estimator",
    tuple(name for name in get_args(AdvEstimator) if name != "gae"),
    "has no lambda: set it to 1.0",
)
NO_GROUP_DEVIATION = NoEffect(
    "algorithm.adv_estimator",
    tuple(name for name in get_args(AdvEstimator) if name not in ("grpo", "grpo_passk")),
    "divides by no deviation of a group: set it to grpo",
)
NO_KL_IN_REWARD = NoEffect(
    "algorithm.use_kl_in_reward", (False,), "takes no KL from the reward: set it to true"
)
FIXED_KL = NoEffect(
    "algorithm.kl_ctrl.type",
    ("fixed",),
    "keeps the weight where it is: set it to adaptive",
    and_also={"algorithm.use_kl_in_reward": True},
)
REWARD_BY_DATA = NoEffect(
    "custom_reward_function.path",
    (None,),
    "takes the rule that fits the data: set it to the file that defines it",
    refused=True,
)
NO_FILTER = NoEffect(
    "algorithm.filter_groups.enable", (False,), "keeps all prompts: set it to true"
)
NO_IS = NoEffect(
    "algorithm.rollout_correction.rollout_is", (None,), "weighs nothing: set it to token"
)
NO_RS = NoEffect(
    "algorithm.rollout_correction.rollout_rs", (None,), "rejects nothing: set it to token_k1"
)
NO_OVERLONG_BUFFER = NoEffect(
    "reward_model.overlong_buffer.enable", (False,), "adds no penalty: set it to true"
)
RULE_DOES_NOT_FAIL = NoEffect(
    "custom_reward_function.path",
    (None,),
    "takes the rule that fits the data, which does not fail: set it to the file that defines it",
)
STOPS_AT_FIRST = NoEffect(
    "reward.on_error", ("stop",), "ends the run at the first failure: set it to a number"
)


def _kl_type(value: object) -> object:
    """``kl_controller`` is an old name of the adaptive controller."""
    return "adaptive" if value == "kl_controller" else value


class KlCtrl(Section):
    """``algorithm.kl_ctrl``: weight of the KL in the reward."""

    type: Annotated[Literal["fixed", "adaptive"], BeforeValidator(_kl_type), NO_KL_IN_REWARD]
    """Constant, or steered towards ``target_kl`` (arXiv 1909.08593, section 2.2)."""
    kl_coef: Annotated[NonNegative, NO_KL_IN_REWARD.allowing(0.0)]
    """The weight, or where it begins."""
    target_kl: Annotated[Positive, NO_KL_IN_REWARD, FIXED_KL]
    """KL that the adaptive controller aims at, nats per token."""
    horizon: Annotated[Count, NO_KL_IN_REWARD, FIXED_KL]
    """Sequences over which the adaptive controller moves the weight."""


class FilterGroups(Section):
    """``algorithm.filter_groups``: DAPO's dynamic sampling."""

    enable: Annotated[bool, RL_ONLY]
    """Train only on prompts whose responses are not all worth the same, and generate further rounds
    until a step has ``data.train_batch_size`` of them (arXiv 2503.14476, section 3.2).
    """
    metric: Annotated[Text, NO_FILTER]
    """What has to differ: ``acc`` or ``score``, the score without the penalty of
    ``reward_model.overlong_buffer``; ``seq_reward``, with it; or a number that
    ``custom_reward_function`` returns beside its score.
    """
    max_num_gen_batches: Annotated[Count, MAY_CHANGE, NO_FILTER]
    """Rounds of a step, at most. It then trains on the prompts that it has; without any the run
    stops.
    """


_OLD_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}


def _rejection(value: object) -> object:
    """Names of older versions of verl."""
    return _OLD_REJECTIONS.get(value, value) if isinstance(value, str) else value


class RolloutCorrection(Section):
    """``algorithm.rollout_correction``: for the difference between the policy that sampled and the
    one that is trained (docs/algorithms.md).
    """

    rollout_is: Annotated[Literal["token", "sequence"] | None, RL_ONLY]
    """Weigh each token's loss with pi_old / pi_rollout, or with its product over the sequence.
    null: neither.
    """
    rollout_is_threshold: Annotated[Positive, NO_IS]
    """Largest weight; larger ones are cut to it."""
    rollout_is_batch_normalize: Annotated[bool, NO_IS]
    """Divide the weights by their mean over the step."""
    rollout_rs: Annotated[
        Literal[
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
        | None,
        BeforeValidator(_rejection),
        RL_ONLY,
    ]
    """Train on no token (``token_``) or sequence (``seq_``) whose ratio is too far from 1. null: on
    all.
    """
    rollout_rs_threshold: Annotated[Positive | Text | None, NO_RS]
    """How far: for k1 the bounds of pi_rollout / pi_old, ``0.5_2.0``, or the upper one alone, of
    which the lower is the inverse; for k2 and k3 the largest value.
    """
    bypass_mode: Annotated[bool, RL_ONLY]
    """Take the engine's log-probs for the old policy's, which saves a forward pass. The ratio of
    PPO's clip is then that to the policy that sampled.
    """


def rejection_bounds(settings: RolloutCorrection) -> tuple[float, float] | None:
    """Lower and upper bound of ``rollout_rs_threshold``; None where it gives none."""
    value = settings.rollout_rs_threshold
    of_ratio = (settings.rollout_rs or "").endswith("_k1")
    try:
        if isinstance(value, str):
            low, high = (float(part) for part in value.split("_"))
        elif value is not None:
            high = float(value)
            low = 1.0 / high
        else:
            return None
    except ValueError:
        return None
    if of_ratio:
        return (low, high) if 0.0 < low <= high else None
    return (0.0, high) if not isinstance(value, str) and high > 0.0 else None


class Algorithm(Section):
    """``algorithm``."""

    adv_estimator: AdvEstimator
    """Estimator of the advantages: docs/algorithms.md has a line on each."""
    max_staleness: Annotated[Whole, RL_ONLY]
    """Most iterations by which the weights that began a response may lag those it trains. 0:
    strictly on-policy.
    """
    norm_adv_by_std_in_grpo: Annotated[bool, NO_GROUP_DEVIATION]
    """grpo, grpo_passk: divide a group's advantages by their standard deviation. false: Dr.GRPO
    (arXiv 2503.20783).
    """
    gamma: Annotated[Share, NO_DISCOUNT]
    """Discount of a token's future reward (reinforce_plus_plus, gae)."""
    lam: Annotated[Share, NO_LAMBDA]
    """GAE's lambda."""
    mask_truncated_completions: Annotated[bool, RL_ONLY]
    """Train on no token of a response that was cut off by the length limit (DAPO's overlong
    filtering, arXiv 2503.14476, section 3.4); its reward stays part of its group's baseline.
    """
    use_kl_in_reward: Annotated[bool, RL_ONLY]
    """Subtract the KL to the reference from the reward of each token."""
    kl_penalty: Annotated[
        Literal["k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs"], NO_KL_IN_REWARD.allowing("kl")
    ]
    """Estimator of the KL of ``use_kl_in_reward``."""
    kl_ctrl: KlCtrl
    filter_groups: FilterGroups
    rollout_correction: RolloutCorrection


class OverlongBuffer(Section):
    """``reward_model.overlong_buffer``: DAPO's penalty for long responses."""

    enable: Annotated[bool, RL_ONLY]
    """Add to the reward of a training response a penalty that grows over its last tokens before
    ``data.max_response_length`` (arXiv 2503.14476, equation 13). It needs no reward model.
    """
    len: Annotated[Count, NO_OVERLONG_BUFFER]
    """Tokens over which it grows, up to ``data.max_response_length``."""
    penalty_factor: Annotated[NonNegative, NO_OVERLONG_BUFFER]
    """The penalty of a response of the full length."""


class RewardModel(Section):
    """``reward_model``: a model that scores responses, and their length."""

    enable: bool
    """Score with a model. Not built yet: true is an error, the other keys have no effect."""
    use_dynamic_bsz: Annotated[bool, NOT_BUILT]
    """Cut the model's micro-batches by tokens."""
    forward_max_token_len_per_gpu: Annotated[Budget, MAY_CHANGE, NOT_BUILT]
    """Most tokens of a micro-batch of a rank."""
    micro_batch_size_per_gpu: Annotated[Count | None, NOT_BUILT]
    """Sequences of a micro-batch when ``use_dynamic_bsz`` is false."""
    overlong_buffer: OverlongBuffer


class Reward(Section):
    """``reward``: which rules judge, and what happens when a reward function fails."""

    rules: Annotated[dict[Text, RuleName], Field(max_length=1000)]
    """Data source -> the rule that judges its answers, before the built-in table (docs/rewards.md).
    ``*`` stands for any characters.
    """

    on_error: Annotated[
        Annotated[float, Field(ge=-LARGEST, le=LARGEST)] | Literal["stop"], RULE_DOES_NOT_FAIL
    ]
    """Score of a response for which ``custom_reward_function`` gives no finite number. stop: the
    run ends at the first one.
    """
    max_failed_share: Annotated[Share, MAY_CHANGE, RULE_DOES_NOT_FAIL, STOPS_AT_FIRST]
    """Largest share of the responses of a step, or of a validation, whose reward may fail; the run
    stops above it. 1: it never does.
    """


class CustomRewardFunction(Section):
    """``custom_reward_function``: your own reward."""

    path: Annotated[Text | None, USER_CODE]
    """Python file that defines it. null: the rule that fits the data. The run keeps a copy of it,
    and of the modules beside it that it imports.
    """
    name: Annotated[Text, REWARD_BY_DATA]
    """Function in that file: ``f(data_source, solution_str, ground_truth, extra_info) ->
    float``.
    """
