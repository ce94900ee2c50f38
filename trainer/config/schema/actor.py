"""``actor_rollout_ref.{model,actor,ref}.*``: the policy, how it is trained, and its reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

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
from trainer.config.schema.markers import LOCAL_PATH, MAY_CHANGE, RL_ONLY, NoEffect

NO_LORA = NoEffect(
    "actor_rollout_ref.model.lora_rank",
    (0,),
    "trains all weights: set lora_rank to 8, 16 or more",
    refused=True,
)
CONSTANT_SCHEDULE = NoEffect(
    "actor_rollout_ref.actor.optim.lr_scheduler_type",
    ("constant",),
    "never falls: set it to linear or cosine",
)
STATIC_MICRO_BATCHES = NoEffect(
    "actor_rollout_ref.actor.use_dynamic_bsz",
    (False,),
    "cuts micro-batches by count and pads them: set it to true",
)
BY_TOKENS = NoEffect(
    "actor_rollout_ref.actor.use_dynamic_bsz",
    (True,),
    "cuts micro-batches by tokens: set it to false",
)
NO_BUCKETING = NoEffect(
    "actor_rollout_ref.actor.dynamic_bsz_bucketing",
    (False,),
    "keeps no buckets apart: set it to true",
)
REF_BY_TOKENS = replace(BY_TOKENS, switch="actor_rollout_ref.ref.log_prob_use_dynamic_bsz")
KlLossType = Literal[
    "k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs", "k1+", "kl+", "k3+", "low_var_kl+", "abs+"
]
LossMode = Literal["vanilla", "gspo", "cispo", "gpg", "clip_cov", "kl_cov", "geo_mean"]
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
NO_RATIO_CLIP = NoEffect(_LOSS_MODE, ("gpg", "kl_cov"), "clips no ratio: set it to vanilla")
NO_DUAL_CLIP = NoEffect(
    _LOSS_MODE,
    tuple(name for name in get_args(LossMode) if name != "vanilla"),
    "has no dual clip: set it to vanilla",
)
NO_CLIP_COV = NoEffect(
    _LOSS_MODE,
    tuple(name for name in get_args(LossMode) if name != "clip_cov"),
    "selects no tokens by these: set it to clip_cov",
)
NO_KL_COV = NoEffect(
    _LOSS_MODE,
    tuple(name for name in get_args(LossMode) if name != "kl_cov"),
    "selects no tokens by these: set it to kl_cov",
)
NO_KL_LOSS = NoEffect(
    "actor_rollout_ref.actor.use_kl_loss", (False,), "adds no KL to the loss: set it to true"
)
NO_CLIPPING = NoEffect(
    "actor_rollout_ref.actor.grad_clip", (0,), "clips nothing: set it to 1.0", refused=True
)
FIXED_CLIPPING = NoEffect(
    "actor_rollout_ref.actor.grad_clip_adaptive",
    (False,),
    "clips all steps alike: set it to true",
)
FIXED_REFERENCE = NoEffect(
    "actor_rollout_ref.ref.ema_interval",
    (None,),
    "keeps the reference as it is: set it to a number of steps",
)


class Model(Section):
    """``actor_rollout_ref.model``."""

    path: Annotated[Text | None, LOCAL_PATH]
    """A Hugging Face folder or hub id, ``builtin:tiny`` (made on the spot) or
    ``builtin:smollm2``.
    """
    trust_remote_code: bool
    """Run code that comes with the model. Only false is supported."""
    enable_gradient_checkpointing: Annotated[bool, MAY_CHANGE]
    """Recompute activations in backward: less memory, about a third more work."""
    lora_rank: Whole
    """Train adapters of this rank (LoRA, arXiv 2106.09685) and leave the model's own weights. 0:
    train all weights.
    """
    lora_alpha: Annotated[Positive, NO_LORA]
    """An adapter adds lora_alpha / lora_rank times the product of its two matrices."""
    target_modules: Annotated[
        Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)], NO_LORA
    ]
    """Linear layers with an adapter, by name: [q_proj,v_proj]. ``all-linear``: all of them but the
    output head.
    """


class Optim(Section):
    """``actor_rollout_ref.actor.optim``: AdamW and its schedule."""

    lr: NonNegative
    """Peak learning rate."""
    lr_warmup_steps: Whole | None
    """Iterations of linear warm-up. null: by ``lr_warmup_steps_ratio``."""
    lr_warmup_steps_ratio: Share
    """Warm-up as a share of all iterations."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"]
    """Shape of the schedule after the warm-up."""
    min_lr_ratio: Annotated[Share, CONSTANT_SCHEDULE]
    """Where a falling schedule ends, as a share of ``lr``."""
    weight_decay: NonNegative
    """Decoupled weight decay of matrices; biases and norms have none."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]
    """Decay of the first and second moments."""
    eps: Positive
    """Term added to the denominator."""
    total_training_steps: Count | None
    """Iterations over which the schedule runs. null: those of the run."""


class ActorCheckpoint(Section):
    """``actor_rollout_ref.actor.checkpoint``."""

    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]]
    """What a checkpoint holds. ``extra``: schedule, random states, loader position."""


def _loss_mode(value: object) -> object:
    """verl also writes ``clip-cov`` and ``kl-cov``."""
    return value.replace("-", "_") if isinstance(value, str) else value


class PolicyLoss(Section):
    """``actor_rollout_ref.actor.policy_loss``: what an optimizer step minimises."""

    loss_mode: Annotated[LossMode, BeforeValidator(_loss_mode), RL_ONLY]
    """vanilla: PPO's clipped ratio. gspo (arXiv 2507.18071), cispo (2506.13585), gpg (2504.02546),
    clip_cov and kl_cov (2505.22617), geo_mean (GMPO, 2507.20673).
    """
    clip_cov_ratio: Annotated[Share, NO_CLIP_COV]
    """clip_cov: share of a mini-batch's tokens that are left out, drawn from those between the
    bounds.
    """
    clip_cov_lb: Annotated[float, Field(ge=-LARGEST, le=LARGEST), NO_CLIP_COV]
    """clip_cov: covariance of log-prob and advantage above which a token may be left out."""
    clip_cov_ub: Annotated[float, Field(ge=-LARGEST, le=LARGEST), NO_CLIP_COV]
    """clip_cov: covariance below which a token may be left out."""
    kl_cov_ratio: Annotated[Share, NO_KL_COV]
    """kl_cov: share of a mini-batch's tokens, those of the largest covariance, that are held to the
    policy that drew them.
    """
    ppo_kl_coef: Annotated[NonNegative, NO_KL_COV]
    """kl_cov: weight with which they are held."""


class Actor(Section):
    """``actor_rollout_ref.actor``."""

    strategy: Literal["deepspeed"]
    """Training engine."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens; so by default unless ``ppo_micro_batch_size_per_gpu`` is set.
    false: that many sequences each, padded to the longest.
    """
    ppo_max_token_len_per_gpu: Annotated[Budget, MAY_CHANGE]
    """Most real tokens of a micro-batch of a rank, with ``use_dynamic_bsz``: one number, a list by
    rank, or ``auto`` (measured at start).
    """
    ppo_mini_batch_size: Count
    """Prompts (RL) or samples (SFT) of one optimizer step, over all ranks."""
    ppo_micro_batch_size_per_gpu: Annotated[Count | None, BY_TOKENS]
    """Sequences of a micro-batch when ``use_dynamic_bsz`` is false."""
    dynamic_bsz_bucketing: Annotated[bool, MAY_CHANGE, STATIC_MICRO_BATCHES]
    """Never mix sequences of different length buckets in a micro-batch, with
    ``use_dynamic_bsz``.
    """
    bucket_boundaries: Annotated[list[Count], Field(min_length=1), MAY_CHANGE, NO_BUCKETING]
    """Upper ends of the buckets of ``dynamic_bsz_bucketing``, tokens: (b[i-1], b[i]], the last
    bucket is open.
    """
    bucket_by: Annotated[Literal["prompt", "total"], MAY_CHANGE, NO_BUCKETING]
    """The length that chooses the bucket."""
    share_prompt: Annotated[
        bool | Literal["auto"], MAY_CHANGE, STATIC_MICRO_BATCHES.allowing(False)
    ]
    """Compute the prompt of a group once per micro-batch. auto: where it saves work."""
    ulysses_sequence_parallel_size: Count
    """Ranks that share one sequence."""
    ppo_epochs: Count
    """Passes over each batch."""
    shuffle: bool
    """Shuffle the batch before it is cut into mini-batches."""
    policy_loss: PolicyLoss
    clip_ratio: Annotated[NonNegative, NO_RATIO_CLIP]
    """PPO's clip range epsilon (arXiv 1707.06347, equation 7)."""
    clip_ratio_low: Annotated[NonNegative, NO_RATIO_CLIP]
    """Lower clip range: the ratio stays above 1 - this (geo_mean: e to the power of minus this)."""
    clip_ratio_high: Annotated[NonNegative, NO_RATIO_CLIP]
    """Upper clip range: the ratio stays below 1 + this (DAPO's clip-higher, arXiv 2503.14476;
    geo_mean: e to the power of this).
    """
    clip_ratio_c: Annotated[float, Field(gt=1, le=LARGEST), NO_DUAL_CLIP]
    """Dual clip: bound on the ratio where the advantage is negative (arXiv 1912.09729)."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ]
    """How token losses become one loss; every mean is over the whole mini-batch of all ranks."""
    entropy_coeff: Annotated[float, Field(ge=-LARGEST, le=LARGEST), RL_ONLY]
    """Weight of the entropy bonus."""
    use_kl_loss: Annotated[bool, RL_ONLY]
    """Add the KL to the reference to the loss."""
    kl_loss_coef: Annotated[NonNegative, NO_KL_LOSS.allowing(0.0)]
    """Weight of the KL loss."""
    kl_loss_type: Annotated[KlLossType, NO_KL_LOSS]
    """Estimator of the KL. ``kl`` is k1, ``mse`` is k2, ``low_var_kl`` is k3. With a ``+`` (k3+)
    the value is that of the estimator and the gradient that of k2, which is unbiased.
    """
    grad_clip: NonNegative
    """Largest global gradient norm. 0: no clipping."""
    grad_clip_adaptive: Annotated[bool, NO_CLIPPING]
    """Lower the threshold for small steps: grad_clip * min(1, sequences /
    ``grad_clip_min_batch_size``).
    """
    grad_clip_min_batch_size: Annotated[Count, FIXED_CLIPPING]
    """Sequences of an optimizer step, over all ranks, from which ``grad_clip`` applies in full."""
    mixed_precision: Literal["auto", "fp32", "bf16"]
    """Type of weights and activations; bf16 keeps an fp32 master copy. auto: bf16 on a GPU and on a
    CPU that multiplies it, fp32 on other CPUs, where bf16 is some 60 times slower.
    """
    zero_stage: Annotated[int, Field(ge=0, le=3), MAY_CHANGE]
    """What is sharded over ranks. 1: optimizer state, 2: and gradients, 3: and weights. By default
    1, and 3 with ``param_offload``.
    """
    param_offload: Annotated[bool, MAY_CHANGE]
    """Keep weights in host memory between uses (ZeRO 3)."""
    grad_offload: Annotated[bool, MAY_CHANGE]
    """Keep gradients in host memory: a part of ``optimizer_offload``, set with it or not at all."""
    optimizer_offload: Annotated[bool, MAY_CHANGE]
    """Keep the optimizer's state in host memory (ZeRO 1-3)."""
    optim: Optim
    checkpoint: ActorCheckpoint


class Ref(Section):
    """``actor_rollout_ref.ref``: the reference policy: frozen, or following the policy."""

    log_prob_use_dynamic_bsz: bool
    """Cut the reference's micro-batches by tokens."""
    log_prob_max_token_len_per_gpu: Annotated[Budget, MAY_CHANGE]
    """Most tokens of a forward-only micro-batch of a rank."""
    log_prob_micro_batch_size_per_gpu: Annotated[Count | None, REF_BY_TOKENS]
    """Sequences of a micro-batch when ``log_prob_use_dynamic_bsz`` is false."""
    ema_interval: Count | None
    """Move the reference towards the policy each so many steps. null: it stays the model that the
    run began with.
    """
    ema_decay: Annotated[Share, FIXED_REFERENCE]
    """Weight of the old reference in each such move: ref <- decay ref + (1 - decay) policy. 0: it
    becomes the policy.
    """
