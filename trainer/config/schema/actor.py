"""``actor_rollout_ref.{model,actor,ref}.*``: the policy, how it is trained, and its reference."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

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


class Model(Section):
    """``actor_rollout_ref.model``."""

    path: Text | None
    """A Hugging Face folder or hub id, ``builtin:tiny`` (made on the spot) or
    ``builtin:smollm2``.
    """
    trust_remote_code: bool
    """Run code that comes with the model. Only false is supported."""
    enable_gradient_checkpointing: bool
    """Recompute activations in backward: less memory, about a third more work."""
    lora_rank: Whole
    """Train adapters of this rank (LoRA, arXiv 2106.09685) and leave the model's own weights. 0:
    train all weights.
    """
    lora_alpha: Positive
    """An adapter adds lora_alpha / lora_rank times the product of its two matrices."""
    target_modules: Literal["all-linear"] | Annotated[list[Text], Field(min_length=1)]
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
    min_lr_ratio: Share
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


class Actor(Section):
    """``actor_rollout_ref.actor``."""

    strategy: Literal["deepspeed"]
    """Training engine."""
    use_dynamic_bsz: bool
    """Cut micro-batches by tokens. false: ``ppo_micro_batch_size_per_gpu`` sequences each, padded
    to the longest.
    """
    ppo_max_token_len_per_gpu: Budget
    """Most real tokens of a micro-batch of a rank, with ``use_dynamic_bsz``: one number, a list by
    rank, or ``auto`` (measured at start).
    """
    ppo_mini_batch_size: Count
    """Prompts (RL) or samples (SFT) of one optimizer step, over all ranks."""
    ppo_micro_batch_size_per_gpu: Count | None
    """Sequences of a micro-batch when ``use_dynamic_bsz`` is false."""
    dynamic_bsz_bucketing: bool
    """Never mix sequences of different length buckets in a micro-batch, with
    ``use_dynamic_bsz``.
    """
    bucket_boundaries: Annotated[list[Count], Field(min_length=1)]
    """Upper ends of the buckets of ``dynamic_bsz_bucketing``, tokens: (b[i-1], b[i]], the last
    bucket is open.
    """
    bucket_by: Literal["prompt", "total"]
    """The length that chooses the bucket."""
    share_prompt: bool | Literal["auto"]
    """Compute the prompt of a group once per micro-batch. auto: where it saves work."""
    ulysses_sequence_parallel_size: Count
    """Ranks that share one sequence."""
    ppo_epochs: Count
    """Passes over each batch."""
    shuffle: bool
    """Shuffle the batch before it is cut into mini-batches."""
    clip_ratio: NonNegative
    """PPO's clip range epsilon (arXiv 1707.06347, equation 7)."""
    clip_ratio_low: NonNegative
    """Lower clip range: the ratio stays above 1 - this."""
    clip_ratio_high: NonNegative
    """Upper clip range: the ratio stays below 1 + this (DAPO's clip-higher, arXiv 2503.14476)."""
    clip_ratio_c: Annotated[float, Field(gt=1)]
    """Dual clip: bound on the ratio where the advantage is negative (arXiv 1912.09729)."""
    loss_agg_mode: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ]
    """How token losses become one loss; every mean is over the whole mini-batch of all ranks."""
    entropy_coeff: float
    """Weight of the entropy bonus."""
    use_kl_loss: bool
    """Add the KL to the reference to the loss."""
    kl_loss_coef: NonNegative
    """Weight of the KL loss."""
    kl_loss_type: Literal["k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs"]
    """Estimator of the KL. ``kl`` is k1, ``mse`` is k2, ``low_var_kl`` is k3."""
    grad_clip: NonNegative
    """Largest global gradient norm. 0: no clipping."""
    grad_clip_adaptive: bool
    """Lower the threshold for small steps: grad_clip * min(1, sequences /
    ``grad_clip_min_batch_size``).
    """
    grad_clip_min_batch_size: Count
    """Sequences of an optimizer step, over all ranks, from which the whole ``grad_clip`` counts."""
    mixed_precision: Literal["auto", "fp32", "bf16"]
    """Type of weights and activations; bf16 keeps an fp32 master copy. auto: bf16 on a GPU and on a
    CPU that multiplies it, fp32 on other CPUs, where bf16 is some 60 times slower.
    """
    zero_stage: Annotated[int, Field(ge=0, le=3)]
    """What is sharded over ranks. 1: optimizer state, 2: and gradients, 3: and weights."""
    param_offload: bool
    """Keep weights in host memory between uses (ZeRO 3)."""
    grad_offload: bool
    """Keep gradients in host memory: a part of ``optimizer_offload``, set with it or not at all."""
    optimizer_offload: bool
    """Keep the optimizer's state in host memory (ZeRO 1-3)."""
    optim: Optim
    checkpoint: ActorCheckpoint


class Ref(Section):
    """``actor_rollout_ref.ref``: the reference policy: frozen, or following the policy."""

    log_prob_use_dynamic_bsz: bool
    """Cut its micro-batches by tokens."""
    log_prob_max_token_len_per_gpu: Budget
    """Most tokens of a forward-only micro-batch of a rank."""
    log_prob_micro_batch_size_per_gpu: Count | None
    """Sequences of a micro-batch when ``log_prob_use_dynamic_bsz`` is false."""
    ema_interval: Count | None
    """Move the reference towards the policy each so many steps. null: it stays the model that the
    run began with.
    """
    ema_decay: Share
    """What it keeps of itself then: ref <- decay ref + (1 - decay) policy. 0: it becomes the
    policy.
    """
