"""Attention of one new token per sequence over a cache, without copying grouped keys and values per query head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "plimsoll_decode"


@contextmanager
def decoding(model: nn.Module) -> Iterator[None]:
    """Within: ``model`` (of transformers) attends by :func:`decode_attention`; then as it did before."""
    AttentionInterface.register(NAME, decode_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    config: Any = model.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One query per row over the cache; more than one, the prefill, are left to sdpa.

    ``query`` [rows, heads, 1, head_dim], ``key`` and ``value`` [rows, kv_heads, columns, head_dim], ``attention_mask``
    bool [rows, 1, 1, columns] or None. Returns [rows, 1, heads, head_dim].

    sdpa would repeat keys and values to the number of query heads, a copy of the whole cache per layer and token.
    """
    if query.shape[2] != 1:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    rows, heads, _, head_dim = query.shape
    grouped = query.to(key.dtype).reshape(rows, key.shape[1], heads // key.shape[1], head_dim)
    scores = grouped @ key.transpose(2, 3) * (head_dim**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return (shares @ value).reshape(rows, 1, heads, head_dim), None
