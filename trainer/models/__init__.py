"""Models: loading, the ragged forward pass, attention backends, log-probs, LoRA.

Read ``policy`` and ``load`` (settings to model), ``layout`` (a batch as one flat row), ``stats``
(log-probs of its targets) and ``head`` (never a whole logits matrix), then ``attention`` with its
backends ``attention_cpu`` and ``attention_cuda``. ``value`` has the
models of values (the critic), ``lora`` and ``adapters`` train adapters,
``tiny``, ``smollm2`` and ``cache`` make the built-in models, ``huggingface`` writes a folder.
"""

from trainer.models.layout import Layout, Packed, Segment, pack, pad
from trainer.models.load import (
    LoadedModel,
    load_model,
    load_tokenizer,
    make_builtin,
    prepare_model,
    resolve,
)
from trainer.models.policy import load_policy
from trainer.models.stats import TokenStats, token_stats
from trainer.models.value import ValueModel, load_value_model, target_values, token_values

__all__ = [
    "Layout",
    "LoadedModel",
    "Packed",
    "Segment",
    "TokenStats",
    "ValueModel",
    "load_model",
    "load_policy",
    "load_tokenizer",
    "load_value_model",
    "make_builtin",
    "pack",
    "pad",
    "prepare_model",
    "resolve",
    "target_values",
    "token_stats",
    "token_values",
]
