"""Weight loading on a CPU: one copy on arrival, and each matrix packed when it is first used.

vLLM's own ``reload_weights`` builds each layer anew, holds what has arrived until the layer is
complete, and copies it three times; it is used on a GPU and for a model that is split. On a CPU
vLLM multiplies with packed matrices: packing doubles the speed of decoding and takes several times
as long as a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def can_pack(model: Any) -> bool:
    """Whether ``load_weights`` can load vLLM's ``model``.

    All its linear layers have to be unquantised, multiplied by a CPU kernel, and on one worker.
    """
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

    layers = [m for m in model.modules() if isinstance(m, LinearBase)]
    return bool(layers) and all(
        hasattr(m, "cpu_linear")
        and isinstance(m.quant_method, UnquantizedLinearMethod)
        and m.tp_size == 1
        for m in layers
    )


def load_weights(
    model: Any, weights: Iterable[tuple[str, Tensor]], *, persistent: bool = False
) -> None:
    """Copy ``weights``, named as in transformers, each before the next one is requested.

    ``persistent``: the tensors stay unchanged until the next load; a matrix is then packed straight
    from its tensor, without a copy.

    Raises KeyError for a name that vLLM's model has no module for.
    """
    from vllm.model_executor.layers.linear import LinearBase

    modules = dict(model.named_modules())
    fused_parts = _fused_parts(model)
    persistent_parts: dict[Any, dict[int, Tensor]] = {}
    for name, tensor in weights:
        path, kind = name.rsplit(".", 1)
        parent, _, leaf = path.rpartition(".")
        fused_name, part = fused_parts.get(leaf, (leaf, None))
        module = modules[f"{parent}.{fused_name}" if parent else fused_name]
        if persistent and kind == "weight" and isinstance(module, LinearBase):
            persistent_parts.setdefault(module, {})[part or 0] = tensor
            continue
        _copy_parameter(module, kind, tensor, part)
    for module, parts in persistent_parts.items():
        module.weight = nn.Parameter(next(iter(parts.values())).new_empty(0), requires_grad=False)
        _pack_on_first_use(module, [parts[i] for i in sorted(parts)])
    head = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        _pack_on_first_use(head)


def skip_embedding_packing(model: Any) -> None:
    """Undo vLLM's packing of the input embedding, which is never multiplied with."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
            module.cpu_linear = nn.functional.linear


def pack_lm_head(model: Any) -> None:
    """Pack the output projection anew after vLLM's ``reload_weights``.

    vLLM leaves the packed copy out where the weight is shared with the embedding, and would go on
    with the one that it was built with.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _fused_parts(model: Any) -> dict[str, tuple[str, int]]:
    """Return for each module name of transformers the fused module of vLLM and the part in it."""
    fused: dict[str, tuple[str, int]] = {}
    for name, parts in model.packed_modules_mapping.items():
        for number, part in enumerate(parts):
            fused[part] = (name, number)
    return fused


def _copy_parameter(module: Any, kind: str, tensor: Tensor, part: int | None) -> None:
    """Copy ``tensor`` into parameter ``kind`` of ``module``, or into the rows of its ``part``."""
    parameter = module.get_parameter(kind)
    if parameter.numel() == 0:  # packing has dropped it
        shape = (module.output_size_per_partition, module.input_size_per_partition)
        parameter = nn.Parameter(torch.empty(shape, dtype=parameter.dtype), requires_grad=False)
        module.weight = parameter
        _pack_on_first_use(module)
    rows = slice(0, len(tensor))
    if part is not None:
        start = sum(module.output_sizes[:part])
        rows = slice(start, start + module.output_sizes[part])
    parameter.data[rows].copy_(tensor)


def _pack_on_first_use(module: Any, parts: Sequence[Tensor] = ()) -> None:
    """Let the first multiplication with ``module``'s weight pack it.

    vLLM packs a copy and drops the plain weight, unless another layer shares it. ``parts`` are
    concatenated to the weight first; without any the weight is already in place.
    """

    def first_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if parts:
            whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
            module.weight = nn.Parameter(whole, requires_grad=False)
        module.quant_method.process_weights_after_loading(module)
        product: Tensor = module.cpu_linear(x, module.weight, bias)
        return product

    module.cpu_linear = first_linear
