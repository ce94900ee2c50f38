"""Models that give a value instead of log-probs: the critic, and any head of one number.

The head is transformers' ``score`` of a token classification with one label, as in verl.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForTokenClassification

from trainer.base.model_folder import KEY
from trainer.base.model_shape import ModelShape
from trainer.models import attention
from trainer.models.layout import Packed
from trainer.models.load import (
    LoadedModel,
    load_tokenizer,
    load_weights,
    model_config,
    require_fitting_tokenizer,
    resolve,
)
from trainer.models.stats import on_device, run_packed

HEAD_WEIGHT = "score.weight"
HEAD_BIAS = "score.bias"


@dataclass(frozen=True)
class ValueModel(LoadedModel):
    """A model ready for :func:`token_values`."""

    fresh_head: bool = True
    """Whether the head was drawn, since the weights hold none."""


class ValueHead(nn.Linear):
    """Hidden states to one number, in float32 whatever the model's type: bf16 would round a value
    to three digits.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        """float32 [..., 1] of ``hidden`` [..., width]."""
        with torch.autocast(hidden.device.type, enabled=False):
            return functional.linear(hidden.float(), self.weight.float(), self.bias.float())


def load_value_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    key: str = KEY,
    gradient_checkpointing: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ValueModel:
    """Load ``path``, which stands at the setting ``key``, as a model of values.

    Any model that ``load_model`` takes, with a head drawn from ``seed``; or one with a head of one
    output (``score``), as token and sequence classification save it. Raises UserError as
    ``load_model`` does, and for a head of more outputs.
    """
    attention.register()
    source = resolve(path, cache_dir, key=key)
    config = model_config(source, path, key=key)
    tokenizer = load_tokenizer(source, path, key=key)
    require_fitting_tokenizer(tokenizer, config.vocab_size, path, key=key)
    config.num_labels = 1
    config.classifier_dropout = 0.0  # transformers' default is 0.1
    model, absent = load_weights(
        AutoModelForTokenClassification,
        source,
        path,
        config,
        dtype,
        key=key,
        head=(HEAD_WEIGHT, HEAD_BIAS),
    )
    prepare_value_model(model)
    if absent:
        _draw_head(model, config.initializer_range, seed, bias_only=HEAD_WEIGHT not in absent)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return ValueModel(
        model.to(device).train(),
        tokenizer,
        ModelShape.from_config(config),
        str(source),
        fresh_head=HEAD_WEIGHT in absent,
    )


def prepare_value_model(model: nn.Module) -> nn.Module:
    """Give a transformers token classification the packed attention, a head in float32 and an
    embedding that trains all of its rows.
    """
    attention.register()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    model.get_input_embeddings().padding_idx = None  # type: ignore[operator]
    score = model.score
    if type(score) is not nn.Linear or score.out_features != 1 or score.bias is None:
        raise TypeError(f"the head must be a Linear layer of one output with a bias, not {score}")
    score.__class__ = ValueHead
    return model


def token_values(
    model: nn.Module, packed: Packed, *, forward: Callable[..., Any] | None = None
) -> Tensor:
    """float32 [tokens of ``packed``]: the value after each token of the flat input, differentiable.

    ``forward`` is called in place of ``model`` when an engine wraps it. Raises UserError when a
    token id is past the vocabulary.
    """
    if not isinstance(model.score, ValueHead):
        raise TypeError("token_values needs a model from load_value_model")
    return run_packed(model, on_device(model, packed), forward).reshape(-1)


def target_values(
    model: nn.Module, packed: Packed, *, forward: Callable[..., Any] | None = None
) -> Tensor:
    """float32 [targets]: the value of the state in which each target was chosen, which is the one
    after the token before it. Arguments and errors as those of :func:`token_values`.
    """
    values = token_values(model, packed, forward=forward)
    return values[packed.sources.to(values.device)]


def _draw_head(model: nn.Module, deviation: float, seed: int, *, bias_only: bool) -> None:
    """Set the bias to 0 and, unless ``bias_only``, draw the weight from N(0, ``deviation``^2)."""
    score = model.score
    assert isinstance(score, ValueHead)
    with torch.no_grad():
        score.bias.zero_()
        if not bias_only:
            generator = torch.Generator().manual_seed(seed)
            score.weight.copy_(torch.randn(score.weight.shape, generator=generator) * deviation)
