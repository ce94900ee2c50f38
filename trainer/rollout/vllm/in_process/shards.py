"""The ranks that share one engine, and their exchanges.

Each of them runs a scheduler of its own, which sees the same requests in the same order and draws
the same tokens, so they take the same steps without a leader. What they can't know of each other is
exchanged over the CPU: the requests of each, and before every step whether one leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.ranks.world import World
from trainer.rollout.protocol import EngineFailed
from trainer.rollout.vllm.engine.options import exchange_timeout

NO_TENSOR = -1
"""Sent instead of a length by a rank that has no tensor because of an error of its own."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Shard ``index`` of ``size``. ``group`` is a gloo group of them, None for a single one."""

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def create(cls, world: World, size: int) -> Shards:
        """Make groups of ``size`` consecutive ranks and return this rank's.

        All ranks call it together; ``size`` divides their number. Exchanges have the time-out of
        the trainer's own group.
        """
        if size == 1:
            return cls()
        number, index = divmod(world.rank, size)
        timeout = exchange_timeout(world)
        groups = [
            dist.new_group(list(range(first, first + size)), backend="gloo", timeout=timeout)
            for first in range(0, world.size, size)
        ]
        return cls(size=size, index=index, group=groups[number])

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return ``values`` of every shard, equally many each.

        Raises EngineFailed when another shard is gone.
        """
        if self.size == 1:
            return [list(values)]
        rows: list[list[int]] = self._all_gather(torch.tensor(values, dtype=torch.int64)).tolist()
        return rows

    def gather_tensors(self, tensor: Tensor | None) -> list[Tensor]:
        """Return the int64 tensor [any length] of every shard.

        A rank passes None when it has none because of an error: it gets an empty list, and all
        others raise EngineFailed.
        """
        if self.size == 1:
            return [] if tensor is None else [tensor]
        length = NO_TENSOR if tensor is None else len(tensor)
        lengths = [row[0] for row in self.gather([length])]
        if tensor is None:
            return []
        if NO_TENSOR in lengths:
            raise EngineFailed(
                f"shard {lengths.index(NO_TENSOR)} of the vllm engine has no requests to share: "
                "see its error"
            )
        padded = torch.zeros(max(lengths), dtype=torch.int64)
        padded[: len(tensor)] = tensor
        rows = self._all_gather(padded)
        return [row[:length] for row, length in zip(rows, lengths, strict=True)]

    def close(self) -> None:
        """Destroy the group; the trainer's groups stay."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _all_gather(self, tensor: Tensor) -> Tensor:
        """Return [shards, length] from ``tensor`` [length], equally long everywhere."""
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(rows, tensor, group=self.group)
        except RuntimeError as error:
            raise EngineFailed(
                f"another shard of the vllm engine gives no sign of life: {error}"
            ) from error
        return torch.stack(rows)


def executor_class(world: World, size: int) -> Any:
    """Return vLLM's executor class for an engine inside the trainer's ranks. Imports vLLM.

    ``size`` ranks share one engine. vLLM's own classes read rank and device from variables that
    only torchrun sets; without them they use device 0 everywhere.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    base: Any = UniProcExecutor if size == 1 else ExecutorWithExternalLauncher
    gpu = world.device.index

    class RankExecutor(base):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            if size == 1:
                method, rank, device = super()._distributed_args()
                return method, rank, device if gpu is None else gpu
            # Ranks do not meet at this address, since the trainer's groups exist. On a CPU it also
            # names shared memory, in which shards would wait for each other for ever; where the
            # addresses differ, vLLM uses the groups instead.
            device = world.local_rank if gpu is None else gpu
            return f"file://rank_{world.rank}", world.rank, device

    return RankExecutor
