"""Generation of responses."""

from trainer.rollout.engine import eos_ids, make_engine
from trainer.rollout.generator import Generator
from trainer.rollout.settings import RolloutEngine, Sample, Sampling

__all__ = ["Generator", "RolloutEngine", "Sample", "Sampling", "eos_ids", "make_engine"]
