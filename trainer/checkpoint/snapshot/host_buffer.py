"""Host memory for snapshots: shared with the writer process, pinned where there is a GPU, taken
once at start.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trainer.base.errors import UserError

_SLACK = 4 << 20
"""Room for headers and small states, which vary from step to step."""


class HostBuffer:
    """``fd`` names the memory for the writer; ``data`` (uint8, [capacity]) is this process's view
    of it.
    """

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.fd = os.memfd_create("plimsoll-checkpoint", os.MFD_CLOEXEC)
        self._pinned = pinned
        self.capacity = 0
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """At least ``nbytes`` of capacity. Contents are lost; nobody may be reading."""
        if nbytes <= self.capacity:
            return
        self._unpin()
        self.capacity = nbytes + nbytes // 64 + _SLACK
        os.ftruncate(self.fd, self.capacity)
        self._map = mmap.mmap(self.fd, self.capacity)
        # Take the pages now: the first copy into fresh pages would be several times slower than the
        # later ones.
        try:
            self._map.madvise(23)  # MADV_POPULATE_WRITE, Linux 5.14
        except OSError:
            memoryview(self._map)[::4096] = bytes(len(range(0, self.capacity, 4096)))
        self.data = torch.frombuffer(self._map, dtype=torch.uint8)
        if self._pinned:
            status = _cudart().cudaHostRegister(self.data.data_ptr(), self.capacity, 0)
            if int(status) != 0:
                raise RuntimeError(
                    f"{self.capacity} bytes of host memory can't be pinned (CUDA error "
                    f"{int(status)})"
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
    """Raise UserError when this machine can't give ``nbytes`` for the snapshots of its ranks."""
    free = available_bytes()
    if nbytes > free:
        raise UserError(
            f"checkpoints need {nbytes / 2**30:.1f} GiB of host memory on this machine for their "
            "snapshots, "
            f"{free / 2**30:.1f} GiB are free; ask for more memory (cluster.mem), or type "
            "trainer.checkpoint.async_save=false, which halves it"
        )


def available_bytes() -> int:
    """Free host memory: the machine's, cut down to what the cgroup leaves."""
    free = sys.maxsize
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    for limit, usage in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        top, used = _read(limit).strip(), _read(usage).strip()
        if top.isdigit() and used.isdigit():
            free = min(free, max(0, int(top) - int(used)))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
