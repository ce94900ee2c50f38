"""The files of one rank as they lie in a host buffer, and how the buffer is filled."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint.snapshot.host_buffer import HostBuffer
from trainer.checkpoint.snapshot.torch_file import TorchFile
from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.writer.progress import FillProgress

CHUNK_BYTES = 16 << 20
"""Bytes copied at a time on the CPU."""
REPORT_BYTES = 64 << 20
"""Bytes after which the writer is told that there is more."""
NICENESS = 10
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class TensorCopy:
    """``source`` (flat, contiguous, live) goes to bytes [offset, offset + nbytes) of the buffer."""

    source: Tensor
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.source.numel() * self.source.element_size()


@dataclass
class SnapshotPlan:
    """Files one after the other in a buffer, each from a page boundary on."""

    files: list[FileSpec] = field(default_factory=list)
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    """(offset, bytes) of all that is no tensor."""
    copies: list[TensorCopy] = field(default_factory=list)
    size: int = 0
    """Bytes of the buffer."""

    def add_bytes(self, path: str, data: bytes) -> None:
        """Add a file with the contents ``data``."""
        start = self._add_file(path, len(data))
        self.parts.append((start, data))

    def add_torch_file(
        self, path: str, file: TorchFile, replacements: Mapping[int, Tensor]
    ) -> None:
        """Add a torch file whose tensors are still to be copied.

        ``replacements``: address of a live tensor -> the tensor that is saved instead of it.
        """
        start = self._add_file(path, file.size)
        self.parts += [(start + offset, data) for offset, data in file.parts]
        for record in file.tensors:
            if record.nbytes:
                tensor = replacements.get(record.tensor.data_ptr(), record.tensor)
                source = tensor.contiguous().view(-1)
                self.copies.append(TensorCopy(source, start + record.offset))

    def _add_file(self, path: str, length: int) -> int:
        start = self.size
        self.files.append(FileSpec(path, start, length))
        self.size = -(-(start + length) // _PAGE_BYTES) * _PAGE_BYTES
        return start


def fill(
    plan: SnapshotPlan,
    buffer: HostBuffer,
    progress: FillProgress,
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy everything into ``buffer``, in order. For a background thread of its own.

    On a GPU the copy uses the side stream ``stream``. On the CPU it runs in this thread, without
    the GIL and at a priority lowered for good, so that it takes what the training step leaves.
    """
    with torch.cuda.stream(stream):  # sets the device, too: this is a new thread
        buffer.grow(plan.size)
    image = buffer.data.numpy()
    for offset, data in plan.parts:
        image[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    if stream is None:
        _copy_from_host(plan.copies, image, progress)
    else:
        _copy_from_gpu(plan.copies, buffer.data, stream)
    progress.advance(plan.size)


def _copy_from_gpu(copies: list[TensorCopy], image: Tensor, stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        for copy in copies:
            target = image[copy.offset : copy.offset + copy.nbytes]
            target.copy_(copy.source.view(torch.uint8), non_blocking=True)
    stream.synchronize()


def _copy_from_host(
    copies: list[TensorCopy], image: np.ndarray[Any, Any], progress: FillProgress
) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    reported = 0
    for copy in copies:
        # numpy copies in one thread: torch would wake its thread pool and take cores away from the
        # training step.
        source = copy.source.view(torch.uint8).numpy()
        for first in range(0, copy.nbytes, CHUNK_BYTES):
            chunk = source[first : first + CHUNK_BYTES]
            start = copy.offset + first
            end = start + len(chunk)
            image[start:end] = chunk
            if start - reported >= REPORT_BYTES:
                reported = end
                progress.advance(reported)
