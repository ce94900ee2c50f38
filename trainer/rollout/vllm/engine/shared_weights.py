"""A model's weights in memory that processes of one node share: one writes, servers read.

This is the one copy from which a node's servers start again with the weights that they had, while
the trainer changes its own. The memory has no name in the file system: it ends with the processes
that hold it, and only their user can open it.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

ALIGN = 64
"""Tensors start at multiples of this, bytes."""
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, kw_only=True)
class IncomingTensor:
    """A tensor that is about to be written."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    fill: Callable[[Tensor], object]
    """Writes the values into the tensor that it is given."""


def incoming_tensors(weights: Iterable[tuple[str, Tensor]]) -> Iterator[IncomingTensor]:
    """Yield tensors of this process, to be copied."""
    for name, tensor in weights:
        yield IncomingTensor(
            name=name, dtype=tensor.dtype, shape=tensor.shape, fill=partial(_copy, tensor)
        )


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


class SharedWeights:
    """The writer. The first ``write`` fixes names, types and shapes, and allocates the memory."""

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._views: dict[str, Tensor] = {}
        self.table = ""
        """Where a reader finds what: JSON, one [name, type, shape, offset in bytes] per tensor."""

    @property
    def path(self) -> str:
        """Where processes of the same user open the memory while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, weights: Iterable[IncomingTensor]) -> None:
        """Fill the memory with ``weights``, one after another. Nobody may be reading meanwhile.

        Raises ValueError for a tensor whose name, type or shape the first ``write`` did not have.
        """
        if not self._views:
            self._write_first(weights)
            return
        for incoming in weights:
            view = self._views.get(incoming.name)
            fits = (
                view is not None
                and view.dtype == incoming.dtype
                and view.shape == torch.Size(incoming.shape)
            )
            if view is None or not fits:
                raise ValueError(
                    f"there is no room for {incoming.name}, {incoming.dtype} {list(incoming.shape)}"
                )
            incoming.fill(view)

    def close(self) -> None:
        """Release the memory, which is freed when no reader holds it. May be called twice."""
        self._views = {}
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_first(self, weights: Iterable[IncomingTensor]) -> None:
        self._fd = os.memfd_create("weights", os.MFD_CLOEXEC)
        rows: list[list[Any]] = []
        end = 0
        for incoming in weights:
            start = -(-end // ALIGN) * ALIGN
            end = start + math.prod(incoming.shape) * incoming.dtype.itemsize
            os.ftruncate(self._fd, end)
            dtype = str(incoming.dtype).removeprefix("torch.")
            rows.append([incoming.name, dtype, list(incoming.shape), start])
            with mmap.mmap(self._fd, end) as memory:
                view = _view(memory, *rows[-1][1:])
                incoming.fill(view)
                del view
        self._map = mmap.mmap(self._fd, end)
        self._views = {row[0]: _view(self._map, *row[1:]) for row in rows}
        self.table = json.dumps(rows)


class SharedWeightsReader:
    """A reader. It holds the mapping between two reads: mapping takes as long as copying."""

    def __init__(self) -> None:
        self._mapped: tuple[str, str, int] | None = None
        """Path, table and inode of the mapped memory."""
        self._views: list[tuple[str, Tensor]] = []

    def read(self, path: str, table: str) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors of the memory at ``path`` as it is now; do not write to them."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            memory_key = (path, table, status.st_ino)
            if memory_key != self._mapped:
                self._views = []  # the mapping ends when the last tensor on it is gone
                memory = mmap.mmap(fd, status.st_size, access=mmap.ACCESS_COPY)
                self._views = [(row[0], _view(memory, *row[1:])) for row in json.loads(table)]
                self._mapped = memory_key
        finally:
            os.close(fd)
        yield from self._views


def _view(memory: mmap.mmap, dtype: str, shape: list[int], start: int) -> Tensor:
    kind = DTYPES[dtype]
    return torch.frombuffer(memory, dtype=kind, count=math.prod(shape), offset=start).view(shape)
