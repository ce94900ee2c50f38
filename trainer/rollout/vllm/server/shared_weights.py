"""A model's weights in memory that processes of one node share: the trainer writes, servers read.

It is the one copy that a node's servers need to start again with the very weights they had,
whatever the trainer is doing then. The memory has no name: it goes with the processes that hold it,
and only their user can open it.
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
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A tensor on its way in."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]
    fill: Callable[[Tensor], object]
    """Writes its values to the memory that it gets."""


def arrivals(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Arrival]:
    """Tensors of this process, to be copied."""
    for name, tensor in weights:
        yield Arrival(
            name=name, dtype=tensor.dtype, shape=tensor.shape, fill=partial(_copy, tensor)
        )


def _copy(tensor: Tensor, to: Tensor) -> None:
    to.copy_(tensor)


class SharedWeights:
    """The writer's side. Made at the first ``write``, which settles names, types and shapes."""

    def __init__(self) -> None:
        self._fd = -1
        self._map: mmap.mmap | None = None
        self._views: dict[str, Tensor] = {}
        self.table = ""
        """What a reader is told: JSON, one [name, type, shape, offset] for each tensor."""

    @property
    def path(self) -> str:
        """Where processes of the same user open it while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def write(self, weights: Iterable[Arrival]) -> None:
        """Let ``weights`` in, one after another. Nobody may be reading meanwhile.

        Raises ValueError for a tensor that the first time's does not equal in name, type and shape.
        """
        if not self._views:
            self._write_first(weights)
            return
        for arrival in weights:
            room = self._views.get(arrival.name)
            if (
                room is None
                or room.dtype != arrival.dtype
                or room.shape != torch.Size(arrival.shape)
            ):
                raise ValueError(
                    f"there is no room for {arrival.name}, {arrival.dtype} {list(arrival.shape)}"
                )
            arrival.fill(room)

    def close(self) -> None:
        """Give the memory back, as soon as no reader holds it."""
        self._views = {}
        self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_first(self, weights: Iterable[Arrival]) -> None:
        self._fd = os.memfd_create("weights", os.MFD_CLOEXEC)
        rows: list[list[Any]] = []
        end = 0
        for arrival in weights:
            start = -(-end // ALIGN) * ALIGN
            end = start + math.prod(arrival.shape) * arrival.dtype.itemsize
            os.ftruncate(self._fd, end)
            rows.append(
                [
                    arrival.name,
                    str(arrival.dtype).removeprefix("torch."),
                    list(arrival.shape),
                    start,
                ]
            )
            with mmap.mmap(self._fd, end) as memory:
                view = _view(memory, *rows[-1][1:])
                arrival.fill(view)
                del view
        self._map = mmap.mmap(self._fd, end)
        self._views = {row[0]: _view(self._map, *row[1:]) for row in rows}
        self.table = json.dumps(rows)


class Reader:
    """A reader's side. It keeps the memory between two reads: to map it anew takes as long as to
    copy it.
    """

    def __init__(self) -> None:
        self._key: tuple[str, str, int] | None = None
        self._views: list[tuple[str, Tensor]] = []

    def read(self, path: str, table: str) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the memory at ``path``, as it is now; not to be written to."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            if (key := (path, table, found.st_ino)) != self._key:
                self._views = []  # the mapping ends when the last tensor on it is gone
                memory = mmap.mmap(fd, found.st_size, access=mmap.ACCESS_COPY)
                self._views = [(row[0], _view(memory, *row[1:])) for row in json.loads(table)]
                self._key = key
        finally:
            os.close(fd)
        yield from self._views


def _view(memory: mmap.mmap, dtype: str, shape: list[int], start: int) -> Tensor:
    kind = DTYPES[dtype]
    return torch.frombuffer(memory, dtype=kind, count=math.prod(shape), offset=start).view(shape)
