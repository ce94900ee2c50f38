"""The typed sections of a run's settings, in verl's key tree.

``base`` has the value types, ``markers`` what a key declares beside its type; then a file for each
top-level group (``actor`` and ``rollout`` for ``actor_rollout_ref``). A docstring under a key is
its meaning in docs/config.md. Defaults are in ``conf/config.yaml``.
"""

from __future__ import annotations

from trainer.config.schema.actor import Actor, ActorCheckpoint, Model, Optim, Ref
from trainer.config.schema.algorithm import (
    Algorithm,
    CustomRewardFunction,
    KlCtrl,
    OverlongBuffer,
    Reward,
    RewardModel,
)
from trainer.config.schema.base import Budget, Section
from trainer.config.schema.critic import Critic, CriticModel, CriticOptim
from trainer.config.schema.data import Data
from trainer.config.schema.rollout import ActorRolloutRef, Rollout, ValKwargs
from trainer.config.schema.trainer import Checkpoint, Trainer, Watermarks


class Config(Section):
    """All settings of a run, resolved and checked."""

    data: Data
    actor_rollout_ref: ActorRolloutRef
    critic: Critic
    reward: Reward
    reward_model: RewardModel
    custom_reward_function: CustomRewardFunction
    algorithm: Algorithm
    trainer: Trainer

    @property
    def uses_critic(self) -> bool:
        """Whether a critic is trained: for the advantages of gae."""
        return self.trainer.mode == "rl" and self.algorithm.adv_estimator == "gae"


__all__ = [
    "Actor",
    "ActorCheckpoint",
    "ActorRolloutRef",
    "Algorithm",
    "Budget",
    "Checkpoint",
    "Config",
    "Critic",
    "CriticModel",
    "CriticOptim",
    "CustomRewardFunction",
    "Data",
    "KlCtrl",
    "Model",
    "Optim",
    "OverlongBuffer",
    "Ref",
    "Reward",
    "RewardModel",
    "Rollout",
    "Section",
    "Trainer",
    "ValKwargs",
    "Watermarks",
]
