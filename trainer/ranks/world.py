"""The group of ranks that train together: process groups, device, and small exchanges over the
CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.environment import RankInfo
from trainer.base.errors import UserError
from trainer.ranks.rendezvous import meet


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank's view of all ranks. ``cpu_group`` is a gloo group: small exchanges never wait
    behind a GPU stream.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    cpu_group: dist.ProcessGroup

    @property
    def is_main(self) -> bool:
        """True on the rank that logs and writes."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Per key the sum over all ranks. Every rank passes the same keys; one exchange."""
        return dict(
            zip(values, self._reduce(list(values.values()), dist.ReduceOp.SUM), strict=True)
        )

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """Per key the maximum over all ranks. Every rank passes the same keys; one exchange."""
        return dict(
            zip(values, self._reduce(list(values.values()), dist.ReduceOp.MAX), strict=True)
        )

    def any(self, flag: int) -> int:
        """The largest ``flag`` of all ranks: how ranks agree on a request that only some of them
        saw.
        """
        return int(self._reduce([float(flag)], dist.ReduceOp.MAX)[0])

    def vector(self, value: float) -> list[float]:
        """``value`` of every rank, by rank."""
        mine = [0.0] * self.size
        mine[self.rank] = value
        return self._reduce(mine, dist.ReduceOp.SUM)

    def texts(self, mine: str) -> list[str]:
        """``mine`` of every rank, by rank."""
        found = [mine] * self.size
        if self.size > 1:
            dist.all_gather_object(found, mine, group=self.cpu_group)
        return found

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Elementwise sum of a CPU ``tensor`` over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.cpu_group)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks, at most the group's time-out."""
        if self.size > 1:
            dist.barrier(group=self.cpu_group)

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=op, group=self.cpu_group)
        return [float(v) for v in tensor]


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` -> the device of this rank.

    Raises UserError when CUDA is asked for and this rank has no GPU.
    """
    gpus = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cuda" and local_rank >= max(gpus, 1) * (gpus > 0):
        raise UserError(
            f"trainer.device=cuda, but local rank {local_rank} finds {gpus} GPU(s); "
            "lower trainer.n_gpus_per_node, or type trainer.device=cpu"
        )
    if gpus == 0:
        return torch.device("cpu")
    # One visible GPU per task is what Slurm gives under --gpus-per-task: then every rank uses
    # number 0.
    device = torch.device("cuda", local_rank if local_rank < gpus else 0)
    torch.cuda.set_device(device)
    return device


def join(info: RankInfo, *, device: str, run_dir: Path, meet_s: float, timeout_s: float) -> World:
    """Meet the other ranks and make the process groups.

    ``meet_s`` bounds the wait for ranks that start late, ``timeout_s`` every collective: a rank
    that died is an error on the others, never a hang.
    """
    where = choose_device(device, info.local_rank)
    if where.type == "cpu":
        # DeepSpeed asks its accelerator for a back end; on a GPU machine this rank is told to stay
        # on the CPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed reads its local rank from the environment and takes it for the number of the GPU.
    os.environ["LOCAL_RANK"] = str(info.local_rank if where.index is None else where.index)
    store = meet(info, run_dir=run_dir, timeout_s=meet_s)
    dist.init_process_group(
        "gloo" if where.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return World(
        rank=info.rank,
        size=info.world_size,
        local_rank=info.local_rank,
        device=where,
        cpu_group=group,
    )


def leave() -> None:
    """Take the process groups down, so that a finished rank leaves no threads behind."""
    if dist.is_initialized():
        dist.destroy_process_group()
