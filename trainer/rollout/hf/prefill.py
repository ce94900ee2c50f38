"""Prefill: each prompt once through the trainer's own packed attention, without padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.models.attention import packed_attention
from trainer.models.layout import Layout, Segment
from trainer.rollout.hf.decoder import Decoder, concatenate

Cache = list[tuple[Tensor, Tensor]]
"""By layer: keys and values [prompts, kv_heads, width, head_dim], filled from the left."""

PREFILL_TOKENS = 16384
"""Most tokens of one prefill pass, unless a single prompt is longer."""


def prefill(decoder: Decoder, prefixes: Sequence[tuple[int, ...]]) -> tuple[Tensor, Cache]:
    """Logits [prompts, vocabulary] after each prefix, and the prefixes' keys and values, as wide as
    the longest prefix.
    """
    width = max(map(len, prefixes))
    logits: list[Tensor] = []
    caches: list[Cache] = []
    start = 0
    while start < len(prefixes):
        end = start + 1
        tokens = len(prefixes[start])
        while end < len(prefixes) and tokens + len(prefixes[end]) <= PREFILL_TOKENS:
            tokens += len(prefixes[end])
            end += 1
        pass_logits, cache = _prefill_pass(decoder, prefixes[start:end], width)
        logits.append(pass_logits)
        caches.append(cache)
        start = end
    merged: Cache = []
    for layer_parts in zip(*caches, strict=True):
        keys = concatenate([keys for keys, _ in layer_parts])
        values = concatenate([values for _, values in layer_parts])
        merged.append((keys, values))
    return concatenate(logits), merged


def _prefill_pass(
    decoder: Decoder, prefixes: Sequence[tuple[int, ...]], width: int
) -> tuple[Tensor, Cache]:
    """One packed forward pass."""
    device = decoder.device
    segments: list[Segment] = []
    start = 0
    for prefix in prefixes:
        segments.append(Segment(start, len(prefix)))
        start += len(prefix)
    layout = Layout(tuple(segments))
    columns = torch.arange(width)
    # A padded cell repeats a real token: its value is finite, and the attention masks it.
    sources = torch.stack([s.start + columns.clamp(max=s.length - 1) for s in segments])
    sources = sources.flatten().to(device)
    cache: Cache = []

    def padded(x: Tensor) -> Tensor:
        """[tokens, kv_heads, head_dim] to [prompts, kv_heads, width, head_dim]."""
        rows = x.index_select(0, sources).view(len(segments), width, *x.shape[1:])
        return rows.transpose(1, 2).contiguous()

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache.append((padded(key), padded(value)))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out, _ = packed_attention(
            decoder.base, q, k, v, None, scaling=decoder.scale, packed_layout=layout
        )
        return out[0]

    ids = torch.tensor([token for prefix in prefixes for token in prefix], device=device)
    positions = torch.cat([torch.arange(s.length) for s in segments]).to(device)
    last = torch.tensor([s.start + s.length - 1 for s in segments], device=device)
    return decoder(ids, positions, attend, last), cache
