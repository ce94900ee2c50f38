"""``critic.*``: the value model of PPO and how it is trained."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from trainer.config.schema.actor import Optim
from trainer.config.schema.algorithm import AdvEstimator
from trainer.config.schema.base import Budget, Count, NonNegative, Positive, Section, Share, Text
from trainer.config.schema.markers import LOCAL_PATH, MAY_CHANGE, NoEffect

NO_CRITIC = NoEffect(
    "algorithm.adv_estimator",
    tuple(name for name in get_args(AdvEstimator) if name != "gae"),
    "trains no critic: set it to gae",
)
CONSTANT_CRITIC_SCHEDULE = NoEffect(
    "critic.optim.lr_scheduler_type",
    ("constant",),
    "never falls: set it to linear or cosine",
    and_also={"algorithm.adv_estimator": "gae"},
)
CRITIC_BY_TOKENS = NoEffect(
    "critic.use_dynamic_bsz",
    (True,),
    "cuts micro-batches by tokens: set it to false",
    and_also={"algorithm.adv_estimator": "gae"},
)


class CriticModel(Section):
    """``critic.model``."""

    path: Annotated[Text | None, LOCAL_PATH, NO_CRITIC]
    """Weights that the critic begins with, of the policy's tokenizer: a causal language model,
    which gets a value head drawn from ``trainer.seed``, or a model with a head of one output
    (``score``). The policy's model unless set.
    """
    enable_gradient_checkpointing: Annotated[bool, MAY_CHANGE, NO_CRITIC]
    """Recompute activations in backward."""


class CriticOptim(Optim):
    """``critic.optim``: AdamW and its schedule."""

    min_lr_ratio: Annotated[Share, CONSTANT_CRITIC_SCHEDULE]
    """Where a falling schedule ends, as a share of ``lr``."""


class Critic(Section):
    """``critic``: the value model."""

    enable: bool | None
    """Whether a critic is trained. null: when ``algorithm.adv_estimator`` is gae, which needs one;
    nothing else reads its values.
    """
    model: CriticModel
    optim: Annotated[CriticOptim, NO_CRITIC]
    use_dynamic_bsz: Annotated[bool, NO_CRITIC]
    """Cut the critic's micro-batches by tokens."""
    ppo_max_token_len_per_gpu: Annotated[Budget, MAY_CHANGE, NO_CRITIC]
    """Most tokens of a micro-batch of a rank in training."""
    forward_max_token_len_per_gpu: Annotated[Budget, MAY_CHANGE, NO_CRITIC]
    """Most tokens of a micro-batch of a rank for the values, which have no backward pass."""
    ppo_micro_batch_size_per_gpu: Annotated[Count | None, NO_CRITIC, CRITIC_BY_TOKENS]
    """Sequences of a micro-batch when ``use_dynamic_bsz`` is false."""
    forward_micro_batch_size_per_gpu: Annotated[Count | None, NO_CRITIC, CRITIC_BY_TOKENS]
    """The same for the values."""
    ppo_mini_batch_size: Annotated[Count, NO_CRITIC]
    """Prompts of one of the critic's optimizer steps, over all ranks."""
    ppo_epochs: Annotated[Count, NO_CRITIC]
    """The critic's passes over each batch."""
    shuffle: Annotated[bool, NO_CRITIC]
    """Shuffle the batch before it is cut into mini-batches."""
    cliprange_value: Annotated[Positive, NO_CRITIC]
    """How far a value may move from the one before the update for its error still to count less:
    PPO's clipped value loss (arXiv 2005.12729, section 3).
    """
    loss_agg_mode: Annotated[
        Literal[
            "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
        ],
        NO_CRITIC,
    ]
    """How the value losses of tokens become one loss."""
    grad_clip: Annotated[NonNegative, NO_CRITIC]
    """Largest global norm of the critic's gradient. 0: no clipping."""
    zero_stage: Annotated[int, Field(ge=0, le=3), MAY_CHANGE, NO_CRITIC]
    """What of the critic is sharded over ranks, as ``actor.zero_stage``."""
    param_offload: Annotated[bool, MAY_CHANGE, NO_CRITIC]
    """Keep the critic's weights in host memory between uses (ZeRO 3)."""
    optimizer_offload: Annotated[bool, MAY_CHANGE, NO_CRITIC]
    """Keep the critic's optimizer state in host memory (ZeRO 1-3)."""
