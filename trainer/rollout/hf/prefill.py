"""Prompts through the model: the trainer's own packed attention, no pads, each prompt once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.models.attention import packed_attention
from trainer.models.layout import Layout, Segment
from trainer.rollout.hf.network import Network, joined

Cache = list[tuple[Tensor, Tensor]]
"""By layer: keys and values [prompts, kv_heads, width, head_dim], filled from the left."""

PREFILL_TOKENS = 16384
"""Most prompt tokens of one prefill pass, but for a longer prompt."""


def prefill(network: Network, prefixes: Sequence[tuple[int, ...]]) -> tuple[Tensor, Cache]:
    """Logits [prompts, vocabulary] behind each prefix, and its keys and values, as wide as the
    longest.
    """
    width = max(map(len, prefixes))
    logits, caches = [], []
    start = 0
    while start < len(prefixes):
        end, tokens = start + 1, len(prefixes[start])
        while end < len(prefixes) and tokens + len(prefixes[end]) <= PREFILL_TOKENS:
            tokens += len(prefixes[end])
            end += 1
        found, cache = _run(network, prefixes[start:end], width)
        logits.append(found)
        caches.append(cache)
        start = end
    by_layer = (zip(*parts, strict=True) for parts in zip(*caches, strict=True))
    return joined(logits), [(joined(list(keys)), joined(list(values))) for keys, values in by_layer]


def _run(network: Network, prefixes: Sequence[tuple[int, ...]], width: int) -> tuple[Tensor, Cache]:
    """One packed pass."""
    device = network.device
    segments, start = [], 0
    for prefix in prefixes:
        segments.append(Segment(start, len(prefix)))
        start += len(prefix)
    layout = Layout(tuple(segments))
    columns = torch.arange(width)
    # A pad repeats a real token: finite, and never looked at.
    places = (
        torch.stack([s.start + columns.clamp(max=s.length - 1) for s in segments])
        .flatten()
        .to(device)
    )
    cache: Cache = []

    def stowed(x: Tensor) -> Tensor:
        rows = x.index_select(0, places).view(len(segments), width, *x.shape[1:])
        return rows.transpose(1, 2).contiguous()

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache.append((stowed(key), stowed(value)))
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        out, _ = packed_attention(
            network.base, q, k, v, None, scaling=network.scale, packed_layout=layout
        )
        return out[0]

    ids = torch.tensor([token for prefix in prefixes for token in prefix], device=device)
    positions = torch.cat([torch.arange(s.length) for s in segments]).to(device)
    last = torch.tensor([s.start + s.length - 1 for s in segments], device=device)
    return network(ids, positions, attend, last), cache
