"""Kernels that vLLM has for a CPU and uses from compiled code only, which takes a minute to
compile; and shorter ways to those it uses anyway: Python's calls are a third of a small model's
layer.

Nothing here changes what is computed, but for the order in which it is rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def use_kernels(model: Any) -> None:
    """Let norms, gates and linear layers of vLLM's ``model``, whose layers are whole and packed, be
    one call each.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase

    for module in model.modules():
        if (
            isinstance(module, RMSNorm)
            and module.has_weight
            and module.variance_size_override is None
        ):
            module._forward_method = partial(_norm, module)
        elif isinstance(module, SiluAndMul):
            module._forward_method = _gate
        elif isinstance(module, Attention):
            module.use_direct_call = True  # the way around is for the compiler
        elif isinstance(module, LinearBase) and not module.skip_bias_add:
            module.forward = partial(_linear if module.return_bias else _plain_linear, module)


def _norm(module: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, module.weight, module.variance_epsilon)
        return x, residual
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, module.weight, module.variance_epsilon)
    return out


def _gate(x: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out


def _plain_linear(module: Any, x: Tensor) -> Tensor:
    product: Tensor = module.cpu_linear(x, module.weight, module.bias)
    return product


def _linear(module: Any, x: Tensor) -> tuple[Tensor, None]:
    return module.cpu_linear(x, module.weight, module.bias), None
