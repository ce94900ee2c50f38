"""Packed attention for CUDA by flash kernels, and a plain one for any device as the reference.

All take queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim], and return
[tokens, heads, head_dim].
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from trainer.models.layout import Layout


@dataclass(frozen=True)
class _VarlenPlan:
    """Offsets int32 [segments + 1] of queries and keys; ``key_rows`` int64 repeats a prefix before
    each of its segments, or is None.
    """

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    key_rows: Tensor | None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention [tokens, heads, head_dim] by flash-attn's varlen kernel: causal, aligned
    to the last key, so that a whole prefix is attended to.
    """
    flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func

    p = _varlen_plan(layout, q.device)
    k = _with_prefixes(k, p)
    v = _with_prefixes(v, p)
    out: Tensor = flash_attn_varlen_func(
        q, k, v, p.cu_q, p.cu_k, p.max_q, p.max_k, softmax_scale=scale, causal=True
    )
    return out


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention [tokens, heads, head_dim] by torch's own varlen kernel, with the same alignment."""
    from torch.nn.attention.varlen import varlen_attn

    p = _varlen_plan(layout, q.device)
    k = _with_prefixes(k, p)
    v = _with_prefixes(v, p)
    gqa = q.shape[1] != k.shape[1]
    out: Any = varlen_attn(
        q, k, v, p.cu_q, p.cu_k, p.max_q, p.max_k, scale=scale, window_size=(-1, 0), enable_gqa=gqa
    )
    assert isinstance(out, Tensor)
    return out


def segment_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention [tokens, heads, head_dim] by one scaled_dot_product_attention per segment, on any
    device and in any precision.
    """
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k = k.repeat_interleave(repeat, dim=1)
        v = v.repeat_interleave(repeat, dim=1)
    parts = []
    for s in layout.segments:
        rows = slice(s.start, s.start + s.length)
        prefix = slice(s.prefix_start, s.prefix_start + s.prefix_length)
        keys, values = (
            torch.cat((x[prefix], x[rows])) if s.prefix_length else x[rows] for x in (k, v)
        )
        bias = causal_lower_right(s.length, keys.shape[0]) if s.prefix_length else None
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q[rows], keys, values))
        part = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, is_causal=bias is None, scale=scale
        )
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


def _with_prefixes(x: Tensor, plan: _VarlenPlan) -> Tensor:
    return x if plan.key_rows is None else x.index_select(0, plan.key_rows)


def _varlen_plan(layout: Layout, device: torch.device) -> _VarlenPlan:
    key = f"varlen:{device}"
    if key not in layout.plans:
        layout.plans[key] = _make_varlen_plan(layout, device)
    plan: _VarlenPlan = layout.plans[key]
    return plan


def _make_varlen_plan(layout: Layout, device: torch.device) -> _VarlenPlan:
    q = torch.tensor([s.length for s in layout.segments])
    k = torch.tensor([s.length + s.prefix_length for s in layout.segments])
    rows = None
    if any(s.prefix_length for s in layout.segments):
        spans = [
            (start, n)
            for s in layout.segments
            for start, n in ((s.prefix_start, s.prefix_length), s[:2])
            if n
        ]
        rows = torch.cat([torch.arange(start, start + n) for start, n in spans]).to(device)

    def offsets(lengths: Tensor) -> Tensor:
        return F.pad(lengths.cumsum(0), (1, 0)).to(device, torch.int32)

    return _VarlenPlan(offsets(q), offsets(k), int(q.max()), int(k.max()), rows)
