"""Where an engine's state lies on this rank, in terms of the model's parameters.

So a checkpoint of any number of ranks and any ZeRO stage can be read into any other. A fragment is
a range of elements of one flattened parameter: of its float32 master copy, of one optimizer moment,
or of the weight that the model computes with. The layout of a ZeRO stage is internal to DeepSpeed:
``stage_1_and_2.py`` and ``bf16_optimizer.py`` keep per-parameter maps (``_hp_mapping``),
``stage3.py`` keeps ``grad_position``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WEIGHT = "weight"
"""Kind of the weights that the model computes with, and of its buffers."""
MASTER = "fp32"
"""Kind of the optimizer's float32 copies."""
STEP = "step"
"""Kind of Adam's count of steps: a scalar per parameter."""
EXTRA = "beside"
"""Kind of tensors that are not the engine's: whole, saved by rank 0. Kinds stand in checkpoints on
disk and never change.
"""


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of parameter ``name``."""

    name: str
    kind: str
    start: int
    tensor: Tensor
    """Flat view of the live memory, [numel]."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.tensor.numel()

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True)
class _MasterRange:
    """Elements of a parameter in a flat tensor that the optimizer steps."""

    name: str
    start: int
    """First element, within the parameter."""
    flat: Tensor
    offset: int
    """First element, within ``flat``."""
    numel: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same range of a tensor shaped like ``flat``, as a flat view, [numel]."""
        return tensor.detach().view(-1).narrow(0, self.offset, self.numel)


def zero_stage(ds: Any) -> int:
    """The ZeRO stage of a DeepSpeed engine."""
    return int(ds.zero_optimization_stage())


def full_shapes(ds: Any) -> dict[str, tuple[int, ...]]:
    """Name -> full shape of every parameter and persistent buffer."""
    shapes = {}
    for name, param in ds.module.named_parameters():
        shapes[name] = tuple(getattr(param, "ds_shape", param.shape))
    for name, buffer in _persistent_buffers(ds.module):
        shapes[name] = tuple(buffer.shape)
    return shapes


def dtype_name(tensor: Tensor) -> str:
    """The element type as it stands in an index: ``float32``, ``bfloat16`` …."""
    return str(tensor.dtype).removeprefix("torch.")


def fragments(
    ds: Any, optimizer_kinds: tuple[str, ...] = (), *, include_untrained: bool = True
) -> list[Fragment]:
    """All fragments of this rank.

    ``optimizer_kinds``: optimizer states to make (zeros) where they don't exist yet.
    ``include_untrained``: also weights that are not trained.
    """
    found = list(_weights(ds, include_untrained))
    optimizer = _torch_optimizer(ds)
    for part in _masters(ds):
        if part.numel == 0:
            continue
        if not _steps_weights_directly(ds):
            found.append(Fragment(part.name, MASTER, part.start, part.of(part.flat)))
        state = optimizer.state[part.flat]
        for kind in optimizer_kinds:
            if kind not in state:
                shape = () if kind == STEP else part.flat.shape
                state[kind] = torch.zeros(shape, dtype=torch.float32, device=part.flat.device)
        found += _optimizer_fragments(part, state)
    return found


def _optimizer_fragments(part: _MasterRange, state: dict[str, Any]) -> Iterator[Fragment]:
    for kind, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"optimizer state {kind!r} of {part.name} is a {type(value).__name__}, not a tensor"
            )
        if value.shape == part.flat.shape and kind != STEP:
            yield Fragment(part.name, kind, part.start, part.of(value))
        elif part.start == 0 or value.numel() == 1:
            yield Fragment(part.name, kind, 0, value.detach().view(-1))


def _steps_weights_directly(ds: Any) -> bool:
    """True when the optimizer steps the model's weights themselves (stage 0 in float32)."""
    return not hasattr(ds.optimizer, "optimizer") and not hasattr(ds.optimizer, "fp16_groups")


def _torch_optimizer(ds: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's."""
    is_plain = _steps_weights_directly(ds)
    optimizer: torch.optim.Optimizer = ds.optimizer if is_plain else ds.optimizer.optimizer
    return optimizer


def _weights(ds: Any, include_untrained: bool) -> Iterator[Fragment]:
    rank = torch.distributed.get_rank()
    for name, param in ds.module.named_parameters():
        if not (include_untrained or param.requires_grad):
            continue
        if not hasattr(param, "ds_tensor"):
            yield Fragment(name, WEIGHT, 0, _flat(param, name))
            continue
        start = rank * param.partition_numel()
        numel = max(0, min(param.partition_numel(), param.ds_numel - start))
        if numel:
            tensor = param.ds_tensor.detach().view(-1).narrow(0, 0, numel)
            yield Fragment(name, WEIGHT, start, tensor)
    for name, buffer in _persistent_buffers(ds.module):
        yield Fragment(name, WEIGHT, 0, _flat(buffer, name))


def _flat(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_contiguous():
        raise TypeError(
            f"{name} is not contiguous in memory; call .contiguous() on it before the engine is "
            "made"
        )
    return tensor.detach().view(-1)


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _masters(ds: Any) -> Iterator[_MasterRange]:
    """The ranges that this rank's optimizer steps; some may be empty."""
    names = {id(param): name for name, param in ds.module.named_parameters()}
    if _steps_weights_directly(ds):
        return _masters_of_plain_optimizer(ds.optimizer, names)
    if zero_stage(ds) == 3:
        return _masters_of_stage_3(ds.optimizer, names)
    return _masters_of_stage_0_to_2(ds.optimizer, names)


def _masters_of_plain_optimizer(optimizer: Any, names: dict[int, str]) -> Iterator[_MasterRange]:
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield _MasterRange(names[id(param)], 0, param, 0, param.numel())


def _masters_of_stage_3(optimizer: Any, names: dict[int, str]) -> Iterator[_MasterRange]:
    rank = torch.distributed.get_rank()
    for index, group in enumerate(optimizer.fp16_groups):
        flat = optimizer.fp32_partitioned_groups_flat[index]
        for param in group:
            _, offset, length = optimizer.grad_position[optimizer.get_param_id(param)]
            start = rank * length
            numel = max(0, min(length, param.ds_numel - start))
            yield _MasterRange(names[id(param)], start, flat, offset, numel)


def _masters_of_stage_0_to_2(optimizer: Any, names: dict[int, str]) -> Iterator[_MasterRange]:
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if not flats:
        flats = optimizer.fp32_groups_flat_partition
    has_bf16_groups = hasattr(optimizer, "bf16_groups")
    groups = optimizer.bf16_groups if has_bf16_groups else optimizer.bit16_groups
    for index, group in enumerate(groups):
        for param in group:
            mapping = param._hp_mapping
            if mapping is None:  # none of its elements belong to this rank
                continue
            low = mapping.lp_fragment_address
            high = mapping.hp_fragment_address
            yield _MasterRange(names[id(param)], low.start, flats[index], high.start, high.numel)
