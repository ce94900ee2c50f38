"""Packed attention on a CPU: segments of similar length share a kernel call, and all responses of a
prompt share the call for their attention to it.

A segment with a prefix attends in two parts, to itself (causal) and to the whole prefix; the parts
are joined by their log-sum-exp. The backward pass of a part needs only the joined output and
log-sum-exp, so it is exact (Liu et al. 2023, ring attention, arXiv:2310.01889, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from trainer.models.layout import Layout, Segment

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

CALL_OVERHEAD = 256
"""Cost of a kernel call in query-key pairs (measured): padding that adds fewer is cheaper."""


@dataclass(frozen=True)
class Bucket:
    """Segments whose attention to themselves is one kernel call."""

    count: int
    width: int
    rows: Tensor | slice
    """Rows of their tokens: int64 [count * width], in which padding repeats a row, or a slice when
    the segments are adjacent and equally long.
    """
    real: Tensor | None = None
    """int64 [tokens]: indices in the padded call that are not padding; None without padding."""
    real_rows: Tensor | None = None
    """int64 [tokens]: the rows of those indices."""


@dataclass(frozen=True)
class Prefix:
    """Queries of all segments behind one prefix, which attend to all of its ``keys``."""

    queries: Tensor | slice
    count: int
    keys: slice


@dataclass(frozen=True)
class CpuPlan:
    """All kernel calls of an attention layer."""

    buckets: tuple[Bucket, ...]
    prefixes: tuple[Prefix, ...]


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """Attention [tokens, heads, head_dim] of queries [tokens, heads, head_dim] to keys and values
    [tokens, kv_heads, head_dim].
    """
    if "cpu" not in layout.plans:
        layout.plans["cpu"] = make_plan(layout.segments)
    out: Tensor = _PackedAttention.apply(q, k, v, layout.plans["cpu"], scale)  # type: ignore[no-untyped-call]
    return out


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: CpuPlan, scale: float) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lse = torch.empty(q.shape[:2], dtype=torch.float32)
        for b in plan.buckets:
            o, part_lse = _forward(*(_take(x, b) for x in (q, k, v)), 0.0, True, scale=scale)
            _put(out, b, o)
            _put(lse, b, part_lse)
        for p in plan.prefixes:
            o, part_lse = _forward(
                _heads(q[p.queries]), _heads(k[p.keys]), _heads(v[p.keys]), 0.0, False, scale=scale
            )
            self_lse = lse[p.queries]
            prefix_lse = part_lse[0].transpose(0, 1)
            joined = torch.logaddexp(self_lse, prefix_lse)
            out[p.queries] = (
                out[p.queries] * (self_lse - joined).exp_()[..., None]
                + o[0].transpose(0, 1) * (prefix_lse - joined).exp_()[..., None]
            ).to(out.dtype)
            lse[p.queries] = joined
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = plan
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dtype = grad.dtype
        # The CPU kernel's backward pass is five times slower in bfloat16 than in float32.
        q, k, v, out, lse, grad = (x.float() for x in (*ctx.saved_tensors, grad))
        dq, dk, dv = (torch.empty(x.shape) for x in (q, k, v))
        for b in ctx.plan.buckets:
            g = _take(grad, b)
            o = _take(out, b)
            if b.real is not None:
                # Padding repeats a query: without a gradient it adds nothing to keys and values.
                g = _only_real(g, b)
            parts = _backward(
                g, *(_take(x, b) for x in (q, k, v)), o, _take(lse, b), 0.0, True, scale=ctx.scale
            )
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                _put(whole, b, part)
        for p in ctx.plan.prefixes:
            parts = _backward(
                _heads(grad[p.queries]),
                _heads(q[p.queries]),
                _heads(k[p.keys]),
                _heads(v[p.keys]),
                _heads(out[p.queries]),
                lse[p.queries].transpose(0, 1)[None],
                0.0,
                False,
                scale=ctx.scale,
            )
            rows: tuple[Any, ...] = (p.queries, p.keys, p.keys)
            for whole, part, part_rows in zip((dq, dk, dv), parts, rows, strict=True):
                whole[part_rows] += part[0].transpose(0, 1)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, None


def _heads(x: Tensor) -> Tensor:
    """[tokens, heads, head_dim] to [1, heads, tokens, head_dim]."""
    return x.transpose(0, 1)[None]


def _take(x: Tensor, b: Bucket) -> Tensor:
    """[tokens, heads, ...] to the bucket's [count, heads, width, ...]."""
    rows = x[b.rows] if isinstance(b.rows, slice) else x.index_select(0, b.rows)
    return rows.view(b.count, b.width, *x.shape[1:]).transpose(1, 2)


def _put(whole: Tensor, b: Bucket, part: Tensor) -> None:
    """Write the bucket's [count, heads, width, ...] back to its rows of [tokens, heads, ...]."""
    flat = part.transpose(1, 2).reshape(b.count * b.width, *whole.shape[1:])
    if isinstance(b.rows, slice):
        whole[b.rows] = flat
    elif b.real is None:
        whole.index_copy_(0, b.rows, flat)
    else:
        assert b.real_rows is not None
        whole.index_copy_(0, b.real_rows, flat.index_select(0, b.real))


def _only_real(g: Tensor, b: Bucket) -> Tensor:
    flat = g.transpose(1, 2).reshape(b.count * b.width, *g.transpose(1, 2).shape[2:])
    kept = torch.zeros_like(flat)
    assert b.real is not None
    kept.index_copy_(0, b.real, flat.index_select(0, b.real))
    return kept.view(b.count, b.width, *kept.shape[1:]).transpose(1, 2)


def make_plan(segments: tuple[Segment, ...]) -> CpuPlan:
    """Group segments of similar length, longest first: a segment joins a call when its padding
    costs less than another call.
    """
    order = sorted((s for s in segments if s.length), key=lambda s: (-s.length, s.start))
    buckets: list[list[Segment]] = []
    for s in order:
        if buckets and _padding(buckets[-1][0].length, s.length) <= CALL_OVERHEAD:
            buckets[-1].append(s)
        else:
            buckets.append([s])
    behind: dict[tuple[int, int], list[Segment]] = {}
    for s in segments:
        if s.length and s.prefix_length:
            behind.setdefault((s.prefix_start, s.prefix_length), []).append(s)
    prefixes = tuple(_prefix(start, n, members) for (start, n), members in behind.items())
    return CpuPlan(tuple(_bucket(b) for b in buckets), prefixes)


def _padding(width: int, length: int) -> int:
    return (width * width - length * length) // 2


def _bucket(members: list[Segment]) -> Bucket:
    members = sorted(members, key=lambda s: s.start)
    width = max(s.length for s in members)
    even = all(s.length == width for s in members)
    if even and all(a.start + width == b.start for a, b in pairwise(members)):
        start = members[0].start
        return Bucket(len(members), width, slice(start, start + width * len(members)))
    starts = torch.tensor([s.start for s in members])
    lengths = torch.tensor([s.length for s in members])
    columns = torch.arange(width)
    rows = starts[:, None] + torch.minimum(columns, lengths[:, None] - 1)
    if even:
        return Bucket(len(members), width, rows.flatten())
    real = (columns < lengths[:, None]).flatten().nonzero().flatten()
    return Bucket(len(members), width, rows.flatten(), real, rows.flatten()[real])


def _prefix(start: int, length: int, members: list[Segment]) -> Prefix:
    members = sorted(members, key=lambda s: s.start)
    keys = slice(start, start + length)
    count = sum(s.length for s in members)
    if all(a.start + a.length == b.start for a, b in pairwise(members)):
        return Prefix(slice(members[0].start, members[0].start + count), count, keys)
    return Prefix(
        torch.cat([torch.arange(s.start, s.start + s.length) for s in members]), count, keys
    )
