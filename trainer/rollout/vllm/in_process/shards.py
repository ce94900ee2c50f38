"""The ranks that hold one engine between them, and what they tell each other.

Each of them runs a scheduler of its own, which sees the same requests in the same order and draws
the same tokens, so they take the same steps without being led. What they can't know of each other
is exchanged here, over the CPU: which requests each has, and before every step whether one wants no
more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.ranks.world import World
from trainer.rollout.protocol import EngineFailed

REFUSED = -1
"""Told in place of a size by a rank that has nothing to say because of an error of its own."""


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Seen from shard ``index`` of ``size``. ``group``: a gloo group of them; None where there is
    one only.
    """

    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, world: World, size: int) -> Shards:
        """Of ``size`` consecutive ranks each. All ranks call together; ``size`` divides their
        number. Waits are bounded as those of the trainer's own group are.
        """
        if size == 1:
            return cls()
        mine, index = divmod(world.rank, size)
        groups = [
            dist.new_group(
                list(range(first, first + size)), backend="gloo", timeout=patience(world)
            )
            for first in range(0, world.size, size)
        ]
        return cls(size=size, index=index, group=groups[mine])

    def tell(self, values: Sequence[int]) -> list[list[int]]:
        """``values`` of every shard, equally many each. Raises EngineFailed when another one is
        gone.
        """
        if self.size == 1:
            return [list(values)]
        rows: list[list[int]] = self._gather(torch.tensor(values, dtype=torch.int64)).tolist()
        return rows

    def share(self, values: Tensor | None) -> list[Tensor]:
        """int64 [any length] of every shard. ``None``: there will be none, and all others raise
        EngineFailed.
        """
        if self.size == 1:
            return [] if values is None else [values]
        sizes = [row[0] for row in self.tell([REFUSED if values is None else len(values)])]
        if values is None:
            return []
        if REFUSED in sizes:
            raise EngineFailed(
                f"shard {sizes.index(REFUSED)} of the vllm engine has no requests to share: see "
                "its error"
            )
        padded = torch.zeros(max(sizes), dtype=torch.int64)
        padded[: len(values)] = values
        return [row[:size] for row, size in zip(self._gather(padded), sizes, strict=True)]

    def close(self) -> None:
        """Give the group back; the trainer's stay."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)

    def _gather(self, values: Tensor) -> Tensor:
        """[size, length] of ``values`` [length], equally long everywhere."""
        found = [torch.empty_like(values) for _ in range(self.size)]
        try:
            dist.all_gather(found, values, group=self.group)
        except RuntimeError as error:
            raise EngineFailed(
                f"another shard of the vllm engine gives no sign of life: {error}"
            ) from error
        return torch.stack(found)


def patience(world: World) -> timedelta:
    """How long the trainer's own small exchanges wait."""
    back_end: Any = world.cpu_group._get_backend(torch.device("cpu"))
    found: timedelta = back_end.options._timeout
    return found


def executor(world: World, size: int) -> Any:
    """The class of vLLM's executor for an engine inside the trainer's ranks, ``size`` of which
    share one. Imports vLLM.

    vLLM's own reads rank and device from variables that only torchrun sets; without them it takes
    device 0 everywhere.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

    base: Any = UniProcExecutor if size == 1 else ExecutorWithExternalLauncher

    class Shard(base):  # type: ignore[misc]
        def _distributed_args(self) -> tuple[str, int, int]:
            if size == 1:
                method, rank, device = super()._distributed_args()
                return method, rank, device if world.device.index is None else world.device.index
            # Nobody meets by this name, since the trainer's groups are up. On a CPU it also names
            # memory by which shards would wait for each other without an end; where the names
            # differ, vLLM takes the groups instead.
            device = world.local_rank if world.device.index is None else world.device.index
            return f"file://rank_{world.rank}", world.rank, device

    return Shard
