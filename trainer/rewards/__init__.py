"""Rewards of responses: the rule for mathematical answers, and a user's own function.

Read in this order: ``types`` (request and score), ``by_source`` (the rule of a data source),
``maths`` (the rule, which reads and compares answers with ``rules``), ``self_check`` (rules tried
on their own truths), ``user`` (loads a user's function), ``guarded_call`` (one call of it),
``scorer`` (worker processes), ``scoring_round`` (responses scored as they arrive), ``shaping``
(length penalties).
"""

from __future__ import annotations

from trainer.rewards.maths import maths
from trainer.rewards.scorer import Scorer
from trainer.rewards.scoring_round import ScoringRound
from trainer.rewards.shaping import OverlongPenalty, length_penalty
from trainer.rewards.types import RewardFunction, RewardRequest, Score
from trainer.rewards.user import load_reward

__all__ = [
    "OverlongPenalty",
    "RewardFunction",
    "RewardRequest",
    "Score",
    "Scorer",
    "ScoringRound",
    "length_penalty",
    "load_reward",
    "maths",
]
