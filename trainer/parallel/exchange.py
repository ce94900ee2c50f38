"""Exchange of ragged columns between ranks: whole batches, or one column computed by several."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from trainer.data.batch import Batch
from trainer.ranks.waits import waiting
from trainer.ranks.world import World


def gather(batch: Batch, world: World, *, order_by: str = "ids") -> Batch:
    """The batches of all ranks as one, the same on every rank, ordered by the row ``order_by``.

    Two exchanges: the sizes in bytes, then the columns themselves. The order makes what follows
    independent of which rank made which sequence. Collective.
    """
    batches = [_unpack(data) for data in _all_gather_bytes(_pack(batch), world)]
    merged = Batch.concat(batches)
    return merged.select(torch.argsort(merged.rows[order_by], stable=True))


def merge_column(pieces: Sequence[tuple[Tensor, Tensor]], num_tokens: int, world: World) -> Tensor:
    """One column, float32 [num_tokens], from pieces that different ranks computed. Collective.

    Each piece is (positions [tokens], values [tokens]); tokens that no piece has hold 0.
    """
    column = torch.zeros(num_tokens, dtype=torch.float32)
    for positions, values in pieces:
        column[positions.cpu()] = values.detach().float().cpu()
    return world.sum_tensor(column)


def means_by_name(rows: Sequence[Mapping[str, float]], world: World) -> dict[str, float]:
    """The mean of each name over the ``rows`` of all ranks that have it. Collective.

    Ranks may know different names.
    """
    rank_totals: dict[str, tuple[float, float]] = {}
    for row in rows:
        for name, value in row.items():
            _add_to(rank_totals, name, value, 1.0)
    totals: dict[str, tuple[float, float]] = {}
    for data in _all_gather_bytes(json.dumps(rank_totals).encode(), world):
        for name, (value, count) in json.loads(data).items():
            _add_to(totals, name, value, count)
    return {name: value / count for name, (value, count) in sorted(totals.items())}


def _add_to(totals: dict[str, tuple[float, float]], name: str, value: float, count: float) -> None:
    old_value, old_count = totals.get(name, (0.0, 0.0))
    totals[name] = (old_value + value, old_count + count)


def _pack(batch: Batch) -> bytes:
    tensors = {"cu_seqlens": batch.cu_seqlens.contiguous()}
    for name, column in batch.columns.items():
        tensors[f"c.{name}"] = column.contiguous()
    for name, row in batch.rows.items():
        tensors[f"r.{name}"] = row.contiguous()
    return bytes(save(tensors))


def _unpack(data: bytes) -> Batch:
    tensors = load(data)
    return Batch(tensors["cu_seqlens"], _named(tensors, "c."), _named(tensors, "r."))


def _named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose name begins with ``prefix``, without it, in order of their names."""
    names = sorted(name for name in tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): tensors[name] for name in names}


def _all_gather_bytes(data: bytes, world: World) -> list[bytes]:
    if world.size == 1:
        return [data]
    sizes = torch.zeros(world.size, dtype=torch.int64)
    sizes[world.rank] = len(data)
    world.sum_tensor(sizes)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(padded) for _ in range(world.size)]
    with waiting("all_gather"):
        dist.all_gather(parts, padded, group=world.cpu_group)
    return [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]
