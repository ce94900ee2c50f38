"""Rewards: the maths rule, a user's own function, mixtures and length penalties."""

from __future__ import annotations

from trainer.rewards.maths import maths
from trainer.rewards.scorer import Scorer
from trainer.rewards.shaping import length_penalty, mix
from trainer.rewards.types import Reward, RewardRequest, Score
from trainer.rewards.user import load_reward

__all__ = [
    "Reward",
    "RewardRequest",
    "Score",
    "Scorer",
    "length_penalty",
    "load_reward",
    "maths",
    "mix",
]
