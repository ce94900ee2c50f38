"""The engine ``hf``: the trainer's own transformers model generates, without a copy of the weights.

Read in this order: ``engine`` (the ``RolloutEngine``), ``generation`` (continuous batching),
``row`` (one response), ``cohort`` (rows with one key/value cache), ``prefill`` (prompts),
``decoder`` (the forward pass), ``sampling`` (random numbers and tokens).
"""

from trainer.rollout.hf.engine import HfEngine

__all__ = ["HfEngine"]
