"""Weights on a CPU: one copy when they come, and each matrix packed when it is first used.

vLLM's own way to new weights builds each layer anew, keeps what was sent until the layer is whole,
and copies it three times; on a GPU, or where a model is split, that is the way. What vLLM
multiplies with on a CPU is packed, which doubles the speed of decoding and takes several times as
long as copying.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def can_pack(model: Any) -> bool:
    """Whether all linear layers of vLLM's ``model`` are packed ones that ``load_plain`` knows, on
    one worker.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    layers = [m for m in model.modules() if isinstance(m, LinearBase)]
    return bool(layers) and all(
        hasattr(m, "cpu_linear")
        and isinstance(m.quant_method, UnquantizedLinearMethod)
        and m.tp_size == 1
        for m in layers
    )


def load_plain(model: Any, weights: Iterable[tuple[str, Tensor]], *, lasting: bool = False) -> None:
    """Copy ``weights``, named as in transformers, each before the next one is asked for.
    ``lasting``: they stay as they are until the next ones are loaded; then a matrix is not copied
    but packed from where it is.

    Raises KeyError for a name that vLLM's model has no place for.
    """
    from vllm.model_executor.layers.linear import LinearBase

    modules = dict(model.named_modules())
    left: dict[Any, dict[int, Tensor]] = {}
    fused = {
        part: (name, i)
        for name, parts in model.packed_modules_mapping.items()
        for i, part in enumerate(parts)
    }
    for name, tensor in weights:
        path, kind = name.rsplit(".", 1)
        parent, _, last = path.rpartition(".")
        whole, part = fused.get(last, (last, None))
        module = modules[f"{parent}.{whole}" if parent else whole]
        if lasting and kind == "weight" and isinstance(module, LinearBase):
            left.setdefault(module, {})[part or 0] = tensor
            continue
        held = module.get_parameter(kind)
        if held.numel() == 0:  # it was packed
            shape = (module.output_size_per_partition, module.input_size_per_partition)
            held = module.weight = nn.Parameter(
                torch.empty(shape, dtype=held.dtype), requires_grad=False
            )
            _pack_on_use(module)
        rows = slice(0, len(tensor))
        if part is not None:
            start = sum(module.output_sizes[:part])
            rows = slice(start, start + module.output_sizes[part])
        held.data[rows].copy_(tensor)
    for module, parts in left.items():
        module.weight = nn.Parameter(next(iter(parts.values())).new_empty(0), requires_grad=False)
        _pack_on_use(module, [parts[i] for i in sorted(parts)])
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        _pack_on_use(head)


def drop_unused(model: Any) -> None:
    """vLLM packs the embedding as well, which is only looked up."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            module.cpu_linear = nn.functional.linear


def pack_head(model: Any) -> None:
    """The packed copy that an output projection has beside its weight. vLLM's own reloading forgets
    it where the weight is the embedding's: it would go on with the one it was built with.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _pack_on_use(module: Any, parts: Sequence[Tensor] = ()) -> None:
    """vLLM packs a copy and drops the plain weight, unless another layer shares it. ``parts``: of
    the weight, one below the other; none: it is in its place.
    """

    def first(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if parts:
            whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            module.weight = nn.Parameter(whole, requires_grad=False)
        module.quant_method.process_weights_after_loading(module)
        product: Tensor = module.cpu_linear(x, module.weight, bias)
        return product

    module.cpu_linear = first
