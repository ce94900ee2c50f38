"""Kernels that vLLM has for a CPU and uses from compiled code only, which takes a minute to compile.

Nothing here changes what is computed, but for the order in which it is rounded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def use_kernels(model: Any) -> None:
    """Let norms and gates of vLLM's ``model`` be one operation each."""
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm

    for module in model.modules():
        if isinstance(module, RMSNorm) and module.has_weight and module.variance_size_override is None:
            module._forward_method = partial(_norm, module)
        elif isinstance(module, SiluAndMul):
            module._forward_method = _gate


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
