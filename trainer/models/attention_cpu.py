"""Packed attention on a CPU: documents of like length share one kernel call, a shared prompt is
attended to once.

A segment with a prefix is attended in two parts, to itself (causal) and to the prefix (whole); the
parts are joined by their log-sum-exp. The backward pass of a part needs only the joined output and
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
"""What one more kernel call costs, in query-key pairs: padding that adds fewer is cheaper
(measured).
"""


@dataclass(frozen=True)
class Bucket:
    """Segments that one call attends to themselves. A slice when they lie side by side and are
    equally long.
    """

    count: int
    width: int
    rows: Tensor | slice
    """Rows of the tokens: int64 [count * width] with the pads repeating a row, or a slice."""
    real: Tensor | None = None
    """int64 [tokens]: places in the padded call that are no pads; None when there are none."""
    real_rows: Tensor | None = None
    """int64 [tokens]: the rows of those places."""


@dataclass(frozen=True)
class Prefix:
    """Queries (of all segments behind one prefix) that attend to all ``keys``."""

    queries: Tensor | slice
    count: int
    keys: slice


@dataclass(frozen=True)
class CpuPlan:
    """All kernel calls of a layer."""

    buckets: tuple[Bucket, ...]
    prefixes: tuple[Prefix, ...]


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, scale: float) -> Tensor:
    """[tokens, heads, head_dim] of queries, [tokens, kv_heads, head_dim] of keys and values, to
    [tokens, heads, head_dim].
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
            mine, theirs = lse[p.queries], part_lse[0].transpose(0, 1)
            joined = torch.logaddexp(mine, theirs)
            out[p.queries] = (
                out[p.queries] * (mine - joined).exp_()[..., None]
                + o[0].transpose(0, 1) * (theirs - joined).exp_()[..., None]
            ).to(out.dtype)
            lse[p.queries] = joined
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dtype = grad.dtype
        # The CPU kernel's backward pass is five times slower in bfloat16 than in float32.
        q, k, v, out, lse, grad = (x.float() for x in (*ctx.saved_tensors, grad))
        dq, dk, dv = (torch.empty(x.shape) for x in (q, k, v))
        for b in ctx.plan.buckets:
            g, o = _take(grad, b), _take(out, b)
            if b.real is not None:
                # A pad's query repeats a real one: without a gradient of its own it adds nothing to
                # keys and values.
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
            for whole, part, at in zip((dq, dk, dv), parts, rows, strict=True):
                whole[at] += part[0].transpose(0, 1)
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
    """Group segments of like length, longest first: one joins a call when its padding costs less
    than a call.
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
    starts, lengths = (
        torch.tensor(x) for x in zip(*((s.start, s.length) for s in members), strict=True)
    )
    places = torch.arange(width)
    rows = starts[:, None] + torch.minimum(places, lengths[:, None] - 1)
    if even:
        return Bucket(len(members), width, rows.flatten())
    real = (places < lengths[:, None]).flatten().nonzero().flatten()
    return Bucket(len(members), width, rows.flatten(), real, rows.flatten()[real])


def _prefix(start: int, length: int, members: list[Segment]) -> Prefix:
    members = sorted(members, key=lambda s: s.start)
    keys, count = slice(start, start + length), sum(s.length for s in members)
    if all(a.start + a.length == b.start for a, b in pairwise(members)):
        return Prefix(slice(members[0].start, members[0].start + count), count, keys)
    return Prefix(
        torch.cat([torch.arange(s.start, s.start + s.length) for s in members]), count, keys
    )
