"""Generation of responses."""

from trainer.rollout.engine import eos_ids, make_engine
from trainer.rollout.protocol import (
    EngineFailed,
    Finished,
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
    "Finished",
    "Generation",
    "Group",
    "NotFiniteError",
    "RolloutEngine",
    "Sample",
    "Sampling",
    "eos_ids",
    "make_engine",
]
