"""One rank's view of all ranks: process groups, device, and small exchanges over the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.errors import UserError
from trainer.base.rank_info import RankInfo
from trainer.ranks.rendezvous import meet
from trainer.ranks.stop_channel import StopChannel
from trainer.ranks.waits import waiting

_stop_channel: StopChannel | None = None


@dataclass(frozen=True, kw_only=True)
class World:
    """One rank among all ranks. Every exchange is collective: all ranks call it.

    Exchanges go through a gloo group, so that they never wait behind a GPU stream.
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device
    cpu_group: dist.ProcessGroup
    local_size: int = 1
    """Ranks on this node."""

    @property
    def is_main(self) -> bool:
        """True on the rank that logs and writes."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sum over all ranks per key. Every rank passes the same keys; one exchange."""
        sums = self._reduce(list(values.values()), dist.ReduceOp.SUM)
        return dict(zip(values, sums, strict=True))

    def max(self, values: Mapping[str, float]) -> dict[str, float]:
        """The maximum over all ranks per key. Every rank passes the same keys; one exchange."""
        maxima = self._reduce(list(values.values()), dist.ReduceOp.MAX)
        return dict(zip(values, maxima, strict=True))

    def any(self, flag: int) -> int:
        """The largest ``flag`` of all ranks: a request that only some of them saw."""
        return int(self._reduce([float(flag)], dist.ReduceOp.MAX)[0])

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` holds on every rank."""
        return self._reduce([float(flag)], dist.ReduceOp.MIN)[0] == 1.0

    def vector(self, value: float) -> list[float]:
        """``value`` of every rank, by rank."""
        values = [0.0] * self.size
        values[self.rank] = value
        return self._reduce(values, dist.ReduceOp.SUM)

    def gather(self, value: Any) -> list[Any]:
        """``value`` of every rank, by rank: any picklable value, for rare and small exchanges."""
        values = [value] * self.size
        if self.size > 1:
            with waiting("gather"):
                dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def broadcast(self, value: Any) -> Any:
        """Rank 0's ``value`` on every rank: any picklable value, for rare and small exchanges."""
        if self.size == 1:
            return value
        box = [value]
        cpu = torch.device("cpu")
        with waiting("broadcast"):
            dist.broadcast_object_list(box, src=0, group=self.cpu_group, device=cpu)
        return box[0]

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Elementwise sum of a CPU ``tensor`` of any shape over all ranks, in place."""
        if self.size > 1:
            with waiting("all_reduce"):
                dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=self.cpu_group)
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks, at most as long as the group's time-out."""
        if self.size > 1:
            with waiting("barrier"):
                dist.barrier(group=self.cpu_group)

    def _reduce(self, values: list[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1 or not values:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        with waiting("all_reduce"):
            dist.all_reduce(tensor, op=op, group=self.cpu_group)
        return [float(v) for v in tensor]


def choose_device(requested: str, local_rank: int) -> torch.device:
    """The device of this rank for ``trainer.device`` (``auto``, ``cpu`` or ``cuda``).

    Raises UserError when CUDA is asked for and this rank has no GPU.
    """
    gpus = torch.cuda.device_count() if requested != "cpu" else 0
    # One visible GPU per task is what Slurm gives under --gpus-per-task: every rank uses number 0.
    index = local_rank if local_rank < gpus else 0
    if requested == "cuda" and local_rank >= max(gpus, 1) * (gpus > 0):
        raise UserError(
            f"trainer.device=cuda, but local rank {local_rank} finds {gpus} GPU(s); "
            "lower trainer.n_gpus_per_node, or type trainer.device=cpu"
        )
    if gpus == 0:
        return torch.device("cpu")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def join(info: RankInfo, *, device: str, run_dir: Path, meet_s: float, timeout_s: float) -> World:
    """Meet the other ranks and make the process groups.

    ``meet_s`` bounds the wait for ranks that start late, ``timeout_s`` every collective: a rank
    that died is an error on the others, never a hang. Raises UserError for a device that is not
    there and for a port in use, PeerLost for ranks that don't come.
    """
    global _stop_channel
    rank_device = choose_device(device, info.local_rank)
    if rank_device.type == "cpu":
        # DeepSpeed picks its accelerator itself; on a GPU machine it would pick the GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # DeepSpeed takes the local rank from the environment for the number of the GPU.
    device_index = info.local_rank if rank_device.index is None else rank_device.index
    os.environ["LOCAL_RANK"] = str(device_index)
    store = meet(info, run_dir=run_dir, timeout_s=meet_s)
    if info.world_size > 1:
        own_store = store.clone()  # type: ignore[attr-defined]
        _stop_channel = StopChannel(own_store, rank=info.rank, size=info.world_size)
        _stop_channel.start()
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(
        "gloo" if rank_device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
    )
    return World(
        rank=info.rank,
        size=info.world_size,
        local_rank=info.local_rank,
        local_size=info.local_world_size,
        device=rank_device,
        cpu_group=dist.new_group(backend="gloo", timeout=timeout),
    )


def leave() -> None:
    """Destroy the process groups, so that a finished rank leaves no threads behind."""
    global _stop_channel
    if _stop_channel is not None:
        _stop_channel.close()
        _stop_channel = None
    if dist.is_initialized():
        dist.destroy_process_group()
