"""Rollout engines, which generate responses, and agents that answer between turns.

Read in this order: ``protocol`` (samples, groups and the engine's interface), ``settings``
(sampling parameters), ``engine`` (from the config to an engine), ``hf`` (the trainer's own model
generates), ``vllm`` (vLLM in this process or in servers), ``group_check`` and ``log_prob_check``
(checks before each generation and at the start). For several turns: ``agent``, ``load_agent``,
``calculator``, ``template``, ``turns``.
"""

from trainer.rollout.engine import eos_ids, make_engine
from trainer.rollout.protocol import (
    EngineFailed,
    FinishedGroup,
    FinishReason,
    Generation,
    Group,
    NotFiniteError,
    RolloutEngine,
    Sample,
)
from trainer.rollout.settings import Sampling

__all__ = [
    "EngineFailed",
    "FinishReason",
    "FinishedGroup",
    "Generation",
    "Group",
    "NotFiniteError",
    "RolloutEngine",
    "Sample",
    "Sampling",
    "eos_ids",
    "make_engine",
]
