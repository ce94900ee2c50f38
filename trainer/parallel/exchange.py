"""Ragged columns between ranks: gather whole batches, or merge a column that different ranks
computed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from trainer.data.batch import Batch
from trainer.ranks.world import World


def gather(batch: Batch, world: World, *, order_by: str = "ids") -> Batch:
    """The batches of all ranks as one, the same on every rank, ordered by the row ``order_by``.

    Two exchanges: the sizes in bytes, then the columns themselves. The order makes what follows
    independent of which rank made which sequence.
    """
    merged = Batch.concat([_unpack(part) for part in _all_gather_bytes(_pack(batch), world)])
    return merged.select(torch.argsort(merged.rows[order_by], stable=True))


def merge_column(pieces: Sequence[tuple[Tensor, Tensor]], num_tokens: int, world: World) -> Tensor:
    """float32 [num_tokens] of (places, values) pieces that were computed on any rank; other tokens
    hold 0.
    """
    column = torch.zeros(num_tokens, dtype=torch.float32)
    for places, values in pieces:
        column[places.cpu()] = values.detach().float().cpu()
    return world.sum_tensor(column)


def means_by_name(rows: Sequence[Mapping[str, float]], world: World) -> dict[str, float]:
    """Per name the mean over the ``rows`` of all ranks that have it. Ranks may know different
    names; collective.
    """
    mine: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            held = mine.setdefault(name, [0.0, 0.0])
            held[:] = held[0] + value, held[1] + 1.0
    sums: dict[str, list[float]] = {}
    for part in _all_gather_bytes(json.dumps(mine).encode(), world):
        for name, (total, count) in json.loads(part).items():
            held = sums.setdefault(name, [0.0, 0.0])
            held[:] = held[0] + total, held[1] + count
    return {name: total / count for name, (total, count) in sorted(sums.items())}


def _pack(batch: Batch) -> bytes:
    tensors = {"cu_seqlens": batch.cu_seqlens}
    tensors |= {f"c.{k}": v for k, v in batch.columns.items()} | {
        f"r.{k}": v for k, v in batch.rows.items()
    }
    return bytes(save({k: v.contiguous() for k, v in tensors.items()}))


def _unpack(data: bytes) -> Batch:
    tensors = load(data)
    columns = {k[2:]: v for k, v in tensors.items() if k.startswith("c.")}
    rows = {k[2:]: v for k, v in tensors.items() if k.startswith("r.")}
    return Batch(tensors["cu_seqlens"], dict(sorted(columns.items())), dict(sorted(rows.items())))


def _all_gather_bytes(data: bytes, world: World) -> list[bytes]:
    if world.size == 1:
        return [data]
    sizes = torch.zeros(world.size, dtype=torch.int64)
    sizes[world.rank] = len(data)
    world.sum_tensor(sizes)
    mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(parts, mine, group=world.cpu_group)
    return [bytes(part[: int(size)].numpy()) for part, size in zip(parts, sizes, strict=True)]
