"""Faster paths through vLLM's layers on a CPU.

vLLM has CPU kernels that it calls from compiled code only, and compiling takes a minute. Here they
are called directly, and the kernels that vLLM uses anyway are called with fewer Python frames: for
a small model these calls are a third of a layer's time.

The results are the same up to the order of rounding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor


def use_cpu_kernels(model: Any) -> None:
    """Make norms, gates and linear layers of vLLM's ``model`` one kernel call each.

    The layers have to be whole (tensor-parallel size 1) and unquantised.
    """
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.linear import LinearBase

    for module in model.modules():
        if isinstance(module, RMSNorm):
            if module.has_weight and module.variance_size_override is None:
                module._forward_method = partial(_rms_norm, module)
        elif isinstance(module, SiluAndMul):
            module._forward_method = _silu_and_mul
        elif isinstance(module, Attention):
            module.use_direct_call = True  # the custom operator only serves the compiler
        elif isinstance(module, LinearBase) and not module.skip_bias_add:
            forward = _linear_and_no_bias if module.return_bias else _linear
            module.forward = partial(forward, module)


def _rms_norm(
    module: Any, x: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    if residual is not None:
        torch.ops._C.fused_add_rms_norm(x, residual, module.weight, module.variance_epsilon)
        return x, residual
    x = x.contiguous()
    out = torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, module.weight, module.variance_epsilon)
    return out


def _silu_and_mul(x: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out


def _linear(module: Any, x: Tensor) -> Tensor:
    product: Tensor = module.cpu_linear(x, module.weight, module.bias)
    return product


def _linear_and_no_bias(module: Any, x: Tensor) -> tuple[Tensor, None]:
    """Return the product, and None for the bias, which has been added."""
    return module.cpu_linear(x, module.weight, module.bias), None
