"""Model loading, the ragged forward pass, attention backends and log-probs."""

from trainer.models.layout import Layout, Packed, Segment, pack, pad
from trainer.models.load import LoadedModel, load_model, load_tokenizer, prepare_model, resolve
from trainer.models.stats import TokenStats, token_stats

__all__ = [
    "Layout",
    "LoadedModel",
    "Packed",
    "Segment",
    "TokenStats",
    "load_model",
    "load_tokenizer",
    "pack",
    "pad",
    "prepare_model",
    "resolve",
    "token_stats",
]
