"""Host memory for snapshots: shared with the writer process, pinned where there is a GPU."""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch

from trainer.base.errors import UserError
from trainer.base.memory import free_host_bytes

SLACK_BYTES = 4 << 20
"""Room for headers and small states, which vary from step to step."""
_MADV_POPULATE_WRITE = 23
"""Linux 5.14; not in ``mmap``."""


class HostBuffer:
    """Memory that the writer process maps by the descriptor ``fd``.

    ``data`` (uint8, [capacity]) is this process's view of it.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        """Takes the memory at once. Raises RuntimeError when it can't be pinned."""
        self.fd = os.memfd_create("plimsoll-checkpoint", os.MFD_CLOEXEC)
        self._pinned = pinned
        self.capacity = 0
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Ensure a capacity of ``nbytes``. Contents are lost; the writer must not be reading."""
        if nbytes <= self.capacity:
            return
        self._unpin()
        self.capacity = nbytes + nbytes // 64 + SLACK_BYTES
        os.ftruncate(self.fd, self.capacity)
        self._map = mmap.mmap(self.fd, self.capacity)
        # Touch the pages now: the first copy into fresh pages takes several times as long as later
        # ones.
        try:
            self._map.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            memoryview(self._map)[::4096] = bytes(len(range(0, self.capacity, 4096)))
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        if self._pinned:
            status = int(_cudart().cudaHostRegister(self.data.data_ptr(), self.capacity, 0))
            if status != 0:
                raise RuntimeError(
                    f"{self.capacity} bytes of host memory can't be pinned (CUDA error {status})"
                )

    def close(self) -> None:
        """Give the memory back."""
        self._unpin()
        self.capacity = 0
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _unpin(self) -> None:
        if self._pinned and self.capacity:
            _cudart().cudaHostUnregister(self.data.data_ptr())


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def require_memory(nbytes: int) -> None:
    """Raises UserError when less than ``nbytes`` are free for the snapshots of this machine."""
    free = free_host_bytes()
    if nbytes > free:
        raise UserError(
            f"checkpoints need {nbytes / 2**30:.1f} GiB of host memory on this machine for their "
            f"snapshots, {free / 2**30:.1f} GiB are free; ask for more memory (cluster.mem), or "
            "type trainer.checkpoint.async_save=false, which halves it"
        )
