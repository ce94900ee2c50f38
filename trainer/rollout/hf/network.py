"""The forward pass of the supported families over flat tokens, with the attention left to the
caller.

Generation of a small model spends its time between kernels. This is the same computation as
transformers' own forward pass (whose modules hold the weights, and whose norms and rotary embedding
are called), without masks, cache classes and hooks, in half as many operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from trainer.models.lora import adapter_of

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim]) to [tokens,
heads, head_dim].
"""


class Network:
    """A Llama, Qwen2 or Qwen3 of transformers. Weights are read anew at each call, so that training
    may change them.
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
        """Where the weights are."""
        device: torch.device = self.head.weight.device
        return device

    def __call__(
        self, ids: Tensor, positions: Tensor, attend: Attend, wanted: Tensor | None = None
    ) -> Tensor:
        """Logits [tokens, vocabulary], or those of the rows ``wanted`` int64.

        ``ids`` and ``positions`` int64 [tokens].
        """
        base, shape = self.base, (len(ids), -1, self.head_dim)
        x = base.embed_tokens.weight[ids]
        cos, sin = base.rotary_emb.forward(x, position_ids=positions[None])
        cos, sin = cos[0, :, None], _signed(sin[0, :, None])
        queries = self.heads * self.head_dim
        keys = queries + self.kv_heads * self.head_dim
        for number, layer in enumerate(base.layers):
            part = layer.self_attn
            h = layer.input_layernorm.forward(x)
            both = h.new_empty(len(ids), keys)
            _project(h, part.q_proj, both[:, :queries])
            _project(h, part.k_proj, both[:, queries:])
            both = both.view(shape)
            if hasattr(part, "q_norm"):
                q, k = (
                    part.q_norm.forward(both[:, : self.heads]),
                    part.k_norm.forward(both[:, self.heads :]),
                )
                both = torch.cat([q, k], dim=1)
            both = _rotated(both, cos, sin)
            v = _projected(h, part.v_proj).view(shape)
            out = attend(number, both[:, : self.heads], both[:, self.heads :], v)
            x = x + _projected(out.reshape(len(ids), queries), part.o_proj)
            h, mlp = layer.post_attention_layernorm.forward(x), layer.mlp
            gate = mlp.act_fn(_projected(h, mlp.gate_proj))
            gate.mul_(_projected(h, mlp.up_proj))
            x = x + _projected(gate, mlp.down_proj)
        if wanted is not None:
            x = x[wanted]
        x, weight = base.norm.forward(x), self.head.weight
        if x.device.type == "cpu":
            # A tall matrix times few columns takes little more than half the time (measured: 576 x
            # 49,152, 64 rows).
            return torch.mm(weight, x.t()).t().contiguous()
        return linear(x, weight)


def joined(parts: list[Tensor]) -> Tensor:
    """``parts`` end to end; one alone is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _project(x: Tensor, projection: nn.Linear, out: Tensor) -> None:
    """The projection of ``x``, written where it is wanted."""
    if projection.bias is None:
        torch.mm(x, projection.weight.t(), out=out)
    else:
        torch.addmm(projection.bias, x, projection.weight.t(), out=out)
    _adapt(x, projection, out)


def _projected(x: Tensor, projection: nn.Linear) -> Tensor:
    return _adapt(x, projection, linear(x, projection.weight, projection.bias))


def _adapt(x: Tensor, projection: nn.Linear, out: Tensor) -> Tensor:
    """``out``, what the layer's own weight made of ``x``, with what its adapter adds, if it has
    one.
    """
    adapter = adapter_of(projection)
    if adapter is not None:
        out.addmm_(x @ adapter.down.t(), adapter.up.t(), alpha=adapter.scale)
    return out


def _signed(sin: Tensor) -> Tensor:
    """The first half negative: then the rotation is x cos + swapped(x) sin."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv:2104.09864) in transformers' order: the halves of a head are
    the pairs.
    """
    swapped = x.view(*x.shape[:-1], 2, -1).flip(-2).view(x.shape)
    return torch.addcmul(x * cos, swapped, sin)
