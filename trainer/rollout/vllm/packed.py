"""Weights straight into the form that vLLM multiplies with on a CPU: one pass, no second copy of the model.

vLLM's own way to new weights builds each layer anew, keeps what was sent until the layer is whole, and copies it three
times; on a GPU, or where a model is split, that is the way.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainer.rollout.vllm.eager import tall_product


@dataclass
class _Staged:
    """A fused layer's weight, until all its parts are there."""

    tensor: Tensor
    parts: set[int] = field(default_factory=set)


def keep_plain(model: Any) -> None:
    """Let the float32 layers of vLLM's ``model`` multiply with plain weights, for good.

    Packing them takes several times as long as copying them, every step anew, and gains nothing in a product with many
    rows. In bfloat16 it does: there the processor's matrix unit wants its own order.
    """
    for module in model.modules():
        if not hasattr(module, "cpu_linear"):
            continue
        held = module.weight
        if held.numel() == 0 and held.dtype == torch.float32:
            whole = torch.empty(module.output_size_per_partition, module.input_size_per_partition, dtype=held.dtype)
            module.weight = nn.Parameter(whole, requires_grad=False)
        if held.dtype == torch.float32:
            module.cpu_linear = nn.functional.linear
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and head.weight.dtype == torch.float32:
        head.cpu_linear = tall_product


def can_pack(model: Any) -> bool:
    """Whether all linear layers of vLLM's ``model`` are packed ones that ``load_packed`` knows, on one worker."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    layers = [m for m in model.modules() if isinstance(m, LinearBase)]
    return bool(layers) and all(
        hasattr(m, "cpu_linear") and isinstance(m.quant_method, UnquantizedLinearMethod) and m.tp_size == 1
        for m in layers
    )


def load_packed(model: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Take ``weights``, named as in transformers, each read before the next one is asked for.

    Raises KeyError for a name that vLLM's model has no place for, ValueError when a part is missing.
    """
    modules = dict(model.named_modules())
    parts = {
        part: (fused, i) for fused, all_of in model.packed_modules_mapping.items() for i, part in enumerate(all_of)
    }
    staged: dict[str, _Staged] = {}
    free: dict[tuple[int, ...], Tensor] = {}
    for name, tensor in weights:
        path, kind = name.rsplit(".", 1)
        parent, last = path.rsplit(".", 1) if "." in path else ("", path)
        fused, part = parts.get(last, (last, None))
        module = modules[f"{parent}.{fused}" if parent else fused]
        held = module.get_parameter(kind)
        if held.numel():
            rows = _rows(module, part) if part is not None else slice(0, len(tensor))
            held.data[rows].copy_(tensor)
        elif part is None:
            _pack(module, tensor)
        else:
            key = f"{parent}.{fused}"
            if key not in staged:
                shape = (sum(module.output_sizes), tensor.shape[1])
                staged[key] = _Staged(free.pop(shape) if shape in free else torch.empty(shape, dtype=tensor.dtype))
            whole = staged[key]
            whole.tensor[_rows(module, part)].copy_(tensor)
            whole.parts.add(part)
            if len(whole.parts) == len(module.output_sizes):
                _pack(module, whole.tensor)
                free[tuple(whole.tensor.shape)] = staged.pop(key).tensor
    if staged:
        raise ValueError(f"parts of {', '.join(staged)} are missing")
    pack_head(model)


def pack_head(model: Any) -> None:
    """The packed copy that an output projection has beside its weight. vLLM's own reloading forgets it where the weight
    is the embedding's: it would go on with the one it was built with.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and head.cpu_linear is not tall_product:
        head.quant_method.process_weights_after_loading(head)


def _rows(module: Any, part: int) -> slice:
    start = sum(module.output_sizes[:part])
    return slice(start, start + module.output_sizes[part])


def _pack(module: Any, weight: Tensor) -> None:
    """vLLM packs a copy, and leaves an empty weight behind."""
    module.weight = nn.Parameter(weight, requires_grad=False)
    module.quant_method.process_weights_after_loading(module)
    if module.weight.numel():
        raise RuntimeError(f"vLLM did not pack {type(module).__name__}: it would read the trainer's own memory")
