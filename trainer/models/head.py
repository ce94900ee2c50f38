"""The output projection, which computes log-probs and entropies from hidden states in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CHUNK_ELEMENTS = {"cuda": 2**25, "cpu": 2**23}
"""Logits in memory at a time by device type: 128 MiB of float32, on a CPU 32 MiB."""


@dataclass(frozen=True)
class HeadRequest:
    """Asks the next forward pass for log-probs (and entropies) instead of logits.

    ``sources``, ``target_ids``: int64 [targets].
    """

    sources: Tensor
    target_ids: Tensor
    temperature: float
    entropy: bool
    chunk_tokens: int


class TokenHead(nn.Linear):
    """A bias-free ``lm_head`` that returns logits unless a request is set.

    It is a module of the model, since ZeRO-3 gathers a module's weight around its forward and
    backward pass.
    """

    _request: HeadRequest | None = None

    @contextmanager
    def answering(self, request: HeadRequest) -> Iterator[None]:
        """Inside the context ``forward`` answers ``request``."""
        self._request = request
        try:
            yield
        finally:
            self._request = None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocabulary] of ``hidden`` [..., width]. On request float32 [targets, 2]:
        log-prob and entropy, which is 0 when not asked for.
        """
        request = self._request
        if request is None:
            return super().forward(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        weight: Tensor = self.weight
        device = flat.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            flat = flat.to(dtype)
            weight = weight.to(dtype)
        with torch.autocast(device, enabled=False):
            out: Tensor = _ChunkedStats.apply(flat, weight, request)  # type: ignore[no-untyped-call]
        return out


class _ChunkedStats(torch.autograd.Function):
    """log p(target) and entropy; forward and backward pass hold logits of ``chunk_tokens`` targets
    at a time.

    With z = logits / temperature, p = softmax(z), H = entropy:
    d log p(t) / dz = onehot(t) - p, and dH / dz = -p * (log p + H).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, request: HeadRequest) -> Tensor:
        count = request.target_ids.numel()
        out = hidden.new_zeros(count, 2, dtype=torch.float32)
        lse = hidden.new_empty(count, dtype=torch.float32)
        for part in _chunks(count, request.chunk_tokens):
            z = _logits(hidden, weight, request, part)
            lse[part] = torch.logsumexp(z, dim=-1)
            picked = z.gather(1, request.target_ids[part, None]).squeeze(1)
            out[part, 0] = picked - lse[part]
            if request.entropy:
                # H = lse - sum p z
                p = torch.exp(z - lse[part, None])
                out[part, 1] = lse[part] - (p * z).sum(-1)
        ctx.save_for_backward(hidden, weight, lse, out)
        ctx.request = request
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, weight, lse, out = ctx.saved_tensors
        request: HeadRequest = ctx.request
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        # Sums over chunks run in float32: bf16 would lose the small late terms.
        d_hidden = hidden.new_zeros(hidden.shape, dtype=torch.float32) if need_hidden else None
        d_weight = weight.new_zeros(weight.shape, dtype=torch.float32) if need_weight else None
        for part in _chunks(request.target_ids.numel(), request.chunk_tokens):
            d = _logits(hidden, weight, request, part).sub_(lse[part, None])  # log p
            g_log_prob = grad[part, :1]
            if request.entropy:
                d_entropy = (d + out[part, 1:]).mul_(grad[part, 1:])
                d = d.exp_().mul_(d_entropy.add_(g_log_prob)).neg_()
            else:
                d = d.exp_().mul_(-g_log_prob)
            d.scatter_add_(1, request.target_ids[part, None], g_log_prob)
            if request.temperature != 1.0:
                d.div_(request.temperature)
            d = d.to(hidden.dtype)
            sources = request.sources[part]
            if d_hidden is not None:
                d_hidden.index_add_(0, sources, (d @ weight).float())
            if d_weight is not None:
                if d.dtype == torch.float32:
                    d_weight.addmm_(d.t(), hidden[sources])
                else:
                    d_weight.add_(d.t() @ hidden[sources])
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            None,
        )


def _chunks(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _logits(hidden: Tensor, weight: Tensor, request: HeadRequest, part: slice) -> Tensor:
    """float32 [chunk, vocabulary], divided by the temperature."""
    z = (hidden[request.sources[part]] @ weight.t()).float()
    return z if request.temperature == 1.0 else z.div_(request.temperature)


def default_chunk(vocabulary: int, device: str = "cuda") -> int:
    """Tokens of a chunk: as many as :data:`CHUNK_ELEMENTS` allows, between 64 and 4,096."""
    return max(64, min(4096, CHUNK_ELEMENTS[device] // max(vocabulary, 1)))


def make_token_head(head: nn.Module) -> TokenHead:
    """Turn the ``lm_head`` of a model into a :class:`TokenHead` in place: same parameter, same
    name, same ties.
    """
    if isinstance(head, TokenHead):
        return head
    if type(head) is not nn.Linear or head.bias is not None:
        raise TypeError(f"the output projection must be a Linear layer without bias, not {head}")
    head.__class__ = TokenHead
    assert isinstance(head, TokenHead)
    return head
