"""Generation with the trainer's own transformers model."""

from trainer.rollout.hf.engine import HfEngine

__all__ = ["HfEngine"]
