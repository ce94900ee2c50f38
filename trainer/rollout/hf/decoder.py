"""The forward pass of the supported model families over flat tokens, for generation.

Generation with a small model spends its time between kernels. This is the computation of
transformers' own forward pass, with its modules' weights, norms and rotary embedding, but without
masks, cache classes and hooks, in half as many operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.models.lora import adapter_of

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The attention: (layer, query [tokens, heads, head_dim], key and value [tokens, kv_heads,
head_dim]) to [tokens, heads, head_dim]. The caller defines it, with its own key/value cache.
"""


class Decoder:
    """A Llama, Qwen2 or Qwen3 of transformers. Each call reads the current weights, so training may
    change them between two calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self.base: Any = model.get_decoder()  # type: ignore[operator]
        self.head: Any = model.get_output_embeddings()  # type: ignore[operator]
        attention = self.base.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.scale: float = attention.scaling
        self.heads: int = self.base.config.num_attention_heads
        self.kv_heads: int = self.base.config.num_key_value_heads

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        device: torch.device = self.head.weight.device
        return device

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: Attend, outputs: Tensor | None = None
    ) -> Tensor:
        """Logits [tokens, vocabulary], or [outputs, vocabulary] of the tokens ``outputs``.

        ``ids`` and ``positions`` int64 [tokens]; ``outputs`` int64 [outputs], indices of tokens.
        """
        base = self.base
        x = base.embed_tokens.weight[ids]
        cos, sin = base.rotary_emb.forward(x, position_ids=positions[None])
        cos = cos[0, :, None]
        sin = _signed(sin[0, :, None])
        for number, layer in enumerate(base.layers):
            x = x + self._attention(number, layer, x, cos, sin, attend)
            h = layer.post_attention_layernorm.forward(x)
            gate = layer.mlp.act_fn(_project(h, layer.mlp.gate_proj))
            gate.mul_(_project(h, layer.mlp.up_proj))
            x = x + _project(gate, layer.mlp.down_proj)
        if outputs is not None:
            x = x[outputs]
        x = base.norm.forward(x)
        weight = self.head.weight
        if x.device.type == "cpu":
            # A tall matrix times few columns takes little more than half the time of the other
            # order (measured: 576 x 49,152, 64 rows).
            return torch.mm(weight, x.t()).t().contiguous()
        return linear(x, weight)

    def _attention(
        self, number: int, layer: Any, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """The attention block of a layer over ``x`` [tokens, features], without the residual."""
        attention = layer.self_attn
        h = layer.input_layernorm.forward(x)
        queries = self.heads * self.head_dim
        # Queries and keys in one tensor, so that one operation rotates both.
        qk = h.new_empty(len(x), queries + self.kv_heads * self.head_dim)
        _project_into(h, attention.q_proj, qk[:, :queries])
        _project_into(h, attention.k_proj, qk[:, queries:])
        qk = qk.view(len(x), -1, self.head_dim)
        if hasattr(attention, "q_norm"):
            q = attention.q_norm.forward(qk[:, : self.heads])
            k = attention.k_norm.forward(qk[:, self.heads :])
            qk = torch.cat([q, k], dim=1)
        qk = _rotate(qk, cos, sin)
        v = _project(h, attention.v_proj).view(len(x), -1, self.head_dim)
        out = attend(number, qk[:, : self.heads], qk[:, self.heads :], v)
        return _project(out.reshape(len(x), queries), attention.o_proj)


def concatenate(parts: list[Tensor]) -> Tensor:
    """``torch.cat`` along the first dimension; a single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _project_into(x: Tensor, projection: nn.Linear, out: Tensor) -> None:
    """Write the projection of ``x`` [tokens, features] to ``out`` [tokens, projected features]."""
    if projection.bias is None:
        torch.mm(x, projection.weight.t(), out=out)
    else:
        torch.addmm(projection.bias, x, projection.weight.t(), out=out)
    _add_adapter(x, projection, out)


def _project(x: Tensor, projection: nn.Linear) -> Tensor:
    """The projection [tokens, projected features] of ``x`` [tokens, features]."""
    return _add_adapter(x, projection, linear(x, projection.weight, projection.bias))


def _add_adapter(x: Tensor, projection: nn.Linear, out: Tensor) -> Tensor:
    """Add to ``out``, the projection by the layer's own weight, what its adapter gives, if any."""
    adapter = adapter_of(projection)
    if adapter is not None:
        out.addmm_(x @ adapter.down.t(), adapter.up.t(), alpha=adapter.scale)
    return out


def _signed(sin: Tensor) -> Tensor:
    """Negate the first half of ``sin``, for ``_rotate``."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) in transformers' order, which pairs the halves
    of a head: x cos + swapped(x) sin, with ``sin`` as ``_signed`` gives it.
    """
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).view(x.shape)
    return torch.addcmul(x * cos, swapped, sin)
