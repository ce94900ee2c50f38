"""The attention that transformers calls: per document under a packed layout, ordinary sdpa without
one.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trainer.models.attention_cpu import cpu_attention
from trainer.models.attention_cuda import flash_attention, segment_attention, varlen_attention
from trainer.models.layout import Layout

NAME = "plimsoll_packed"
"""The ``attn_implementation`` under which transformers finds this backend."""


def register() -> None:
    """Make the backend known to transformers. Idempotent."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a packed row: [1, tokens, heads, head_dim], from ``query`` [1, heads, tokens,
    head_dim], ``key`` and ``value`` [1, kv_heads, tokens, head_dim].

    Without ``packed_layout`` (generation, a padded batch) it is transformers' sdpa, so that one
    model object serves both.
    """
    if packed_layout is None:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    device = query.device.type
    # Under autocast rotary embeddings leave query and key in float32, but values are lower.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    # [tokens, heads, head_dim], which is contiguous as the projections wrote it.
    q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    backend = choose(device, dtype, query.shape[-1], str(query.device))
    return _BACKENDS[backend](q, k, v, packed_layout, scale)[None], None


_BACKENDS = {
    "cpu": cpu_attention,
    "flash": flash_attention,
    "varlen": varlen_attention,
    "segments": segment_attention,
}


@lru_cache(maxsize=64)
def choose(device: str, dtype: torch.dtype, head_dim: int, name: str) -> str:
    """The backend for a device: cpu, flash (the flash-attn package), varlen (torch's own kernel) or
    segments (any device). ``name``: the device, e.g. ``cuda:1``.
    """
    if device == "cpu":
        return "cpu"
    kernel_fits = dtype in (torch.float16, torch.bfloat16) and head_dim <= 256
    if device == "cuda" and kernel_fits and torch.cuda.get_device_capability(name) >= (8, 0):
        if importlib.util.find_spec("flash_attn") is not None:
            return "flash"
        if importlib.util.find_spec("torch.nn.attention.varlen") is not None:
            return "varlen"
    return "segments"
