"""Where an engine's state lives on this rank, told in the model's own terms: so a checkpoint of any
number of ranks and any ZeRO stage can be read into any other.

A fragment is a run of elements of one parameter (flattened): of its float32 master copy, of one
optimizer moment, or of the weight the model computes with. How a stage lays them out is DeepSpeed's
affair: ``stage_1_and_2.py`` and ``bf16_optimizer.py`` keep per-parameter maps (``_hp_mapping``),
``stage3.py`` keeps ``grad_position``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WEIGHT = "weight"
"""What the model computes with; buffers too."""
MASTER = "fp32"
"""The optimizer's float32 copy."""
STEP = "step"
"""Adam's count of steps: a scalar per parameter."""
BESIDE = "beside"
"""A tensor that is not the engine's: whole, of rank 0."""


@dataclass(frozen=True)
class Fragment:
    """``tensor`` (flat view of live memory) holds elements [start, start + numel) of parameter
    ``name``.
    """

    name: str
    kind: str
    start: int
    tensor: Tensor

    @property
    def numel(self) -> int:
        """Elements."""
        return self.tensor.numel()


def zero_stage(ds: Any) -> int:
    """The ZeRO stage of a DeepSpeed engine."""
    return int(ds.zero_optimization_stage())


def shapes(ds: Any) -> dict[str, tuple[int, ...]]:
    """Full shape of every parameter and persistent buffer."""
    found = {
        name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in ds.module.named_parameters()
    }
    return found | {name: tuple(b.shape) for name, b in _buffers(ds.module)}


def fragments(
    ds: Any, kinds: tuple[str, ...] | None = None, *, frozen: bool = True
) -> list[Fragment]:
    """All fragments of this rank, those of weights that are not trained only if ``frozen``.
    ``kinds``: make these optimizer states (zeros) where they don't exist yet.
    """
    found = list(_weights(ds, frozen))
    for name, start, flat, first, numel in _masters(ds):
        if numel == 0:
            continue
        part = flat.detach().view(-1).narrow(0, first, numel)
        if not _is_weight(ds):
            found.append(Fragment(name, MASTER, start, part))
        state = _optimizer(ds).state[flat]
        for kind in kinds or ():
            if kind not in state:
                shape = () if kind == STEP else flat.shape
                state[kind] = torch.zeros(shape, dtype=torch.float32, device=flat.device)
        for kind, value in state.items():
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"optimizer state {kind!r} of {name} is a {type(value).__name__}, not a tensor"
                )
            if value.shape == flat.shape and kind != STEP:
                found.append(
                    Fragment(name, kind, start, value.detach().view(-1).narrow(0, first, numel))
                )
            elif start == 0 or value.numel() == 1:
                found.append(Fragment(name, kind, 0, value.detach().view(-1)))
    return found


def _is_weight(ds: Any) -> bool:
    """True when the optimizer steps the model's weights themselves (stage 0 in float32)."""
    return not hasattr(ds.optimizer, "optimizer") and not hasattr(ds.optimizer, "fp16_groups")


def _optimizer(ds: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside."""
    inner: torch.optim.Optimizer = ds.optimizer if _is_weight(ds) else ds.optimizer.optimizer
    return inner


def _weights(ds: Any, frozen: bool) -> Iterator[Fragment]:
    rank = torch.distributed.get_rank()
    for name, param in ds.module.named_parameters():
        if not (frozen or param.requires_grad):
            continue
        if hasattr(param, "ds_tensor"):
            start = rank * param.partition_numel()
            numel = max(0, min(param.partition_numel(), param.ds_numel - start))
            if numel:
                yield Fragment(
                    name, WEIGHT, start, param.ds_tensor.detach().view(-1).narrow(0, 0, numel)
                )
        else:
            yield Fragment(name, WEIGHT, 0, _flat(param, name))
    for name, buffer in _buffers(ds.module):
        yield Fragment(name, WEIGHT, 0, _flat(buffer, name))


def _flat(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_contiguous():
        raise TypeError(
            f"{name} is not contiguous in memory; call .contiguous() on it before the engine is "
            "made"
        )
    return tensor.detach().view(-1)


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


def _masters(ds: Any) -> Iterator[tuple[str, int, Tensor, int, int]]:
    """Per piece: name, its start within the parameter, the flat tensor the optimizer steps, start
    there, length.
    """
    names = {id(p): name for name, p in ds.module.named_parameters()}
    opt = ds.optimizer
    if _is_weight(ds):
        for group in opt.param_groups:
            for param in group["params"]:
                yield names[id(param)], 0, param, 0, param.numel()
    elif zero_stage(ds) == 3:
        rank = torch.distributed.get_rank()
        for index, group in enumerate(opt.fp16_groups):
            for param in group:
                _, first, length = opt.grad_position[opt.get_param_id(param)]
                start = rank * length
                numel = max(0, min(length, param.ds_numel - start))
                yield names[id(param)], start, opt.fp32_partitioned_groups_flat[index], first, numel
    else:
        flats = (
            getattr(opt, "single_partition_of_fp32_groups", None) or opt.fp32_groups_flat_partition
        )
        for index, group in enumerate(
            opt.bf16_groups if hasattr(opt, "bf16_groups") else opt.bit16_groups
        ):
            for param in group:
                mapping = param._hp_mapping
                if mapping is not None:
                    low, high = mapping.lp_fragment_address, mapping.hp_fragment_address
                    yield names[id(param)], low.start, flats[index], high.start, high.numel
