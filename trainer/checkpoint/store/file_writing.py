"""How a file is written and hashed: large files by direct I/O, small ones through the page cache.

Direct I/O (O_DIRECT) spares the training step the kernel's write-back, which disregards the
priority of the writer process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128

CHUNK_BYTES = 8 << 20
"""Bytes per write call through the page cache: large enough for the disk, small enough to be hashed
from the processor's cache.
"""
DIRECT_ALIGNMENT = 4096
"""Direct I/O needs file offsets, memory addresses and lengths that are multiples of this."""
COPY_BYTES = 1 << 20
"""Bytes copied and hashed at a time before direct I/O: they stay in the processor's cache."""
DIRECT_FROM_BYTES = 16 << 20
"""Size from which files are written by direct I/O."""
CHECKSUM_BYTES = 64 << 20
"""Bytes under one checksum: damage is located by the chunk, and ranks share the check of a file."""
FLUSH_BYTES = 64 << 20
"""Bytes after which the kernel is told to start write-back, so that the final fsync is short."""


class FileContents(Protocol):
    """Bytes of a file, in memory or still being produced: taking a slice waits for it."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


def write_new_file(path: Path, data: FileContents) -> list[str]:
    """Write ``data`` to a new file. Returns the xxh3-128 in hex of each ``CHECKSUM_BYTES``."""
    fd, is_direct = _open(path, len(data))
    with open(fd, "wb", buffering=0):
        return _write_direct(fd, data) if is_direct else _write_buffered(fd, data)


def file_digest(path: Path, start: int = 0, length: int | None = None) -> str:
    """xxh3-128 in hex of ``length`` bytes of a file from ``start`` on.

    Fewer bytes where the file ends before that; all of them for ``length=None``.
    """
    digest = xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = path.stat().st_size - start if length is None else length
        while left > 0:
            chunk = file.read(min(CHUNK_BYTES, left))
            if not chunk:
                break
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


def _open(path: Path, nbytes: int) -> tuple[int, bool]:
    """Open a new file. Returns its descriptor and whether it takes direct I/O."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if nbytes >= DIRECT_FROM_BYTES:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system without direct I/O
                raise
    return os.open(path, flags, 0o600), False


def _write_direct(fd: int, data: FileContents) -> list[str]:
    """Write through two buffers of huge pages: one is filled and hashed while the other is written.

    Small pages would make many short requests to the disk, and half as many bytes per second.
    """
    digests = []
    size = len(data)
    buffers = [_aligned_buffer(min(CHECKSUM_BYTES, size)) for _ in range(2)]
    with ThreadPoolExecutor(1) as writer:
        pending: Future[None] | None = None
        for number, start in enumerate(range(0, size, CHECKSUM_BYTES)):
            buffer = buffers[number % 2]
            length = min(CHECKSUM_BYTES, size - start)
            digest = xxh3_128()
            for first in range(0, length, COPY_BYTES):
                chunk = buffer[first : min(first + COPY_BYTES, length)]
                chunk[:] = data[start + first : start + first + len(chunk)]
                digest.update(chunk)
            digests.append(digest.hexdigest())
            if pending is not None:
                pending.result()
            pending = writer.submit(_write_at, fd, buffer[: _aligned(length)], start)
        if pending is not None:
            pending.result()
    os.ftruncate(fd, size)  # the last block is padded
    return digests


def _write_buffered(fd: int, data: FileContents) -> list[str]:
    digests = [xxh3_128() for _ in range(0, len(data), CHECKSUM_BYTES)]
    flushed = 0
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        digests[start // CHECKSUM_BYTES].update(chunk)
        _write_at(fd, chunk, start)
        end = start + CHUNK_BYTES
        if end - flushed >= FLUSH_BYTES:
            # DONTNEED starts the write-back of dirty pages without waiting for it; the pages stay
            # until they are clean.
            os.posix_fadvise(fd, flushed, end - flushed, os.POSIX_FADV_DONTNEED)
            flushed = end
    return [digest.hexdigest() for digest in digests]


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while len(data):
        try:
            written = os.pwrite(fd, data, offset)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            # A file system with larger blocks than DIRECT_ALIGNMENT.
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            continue
        data = data[written:]
        offset += written


def _aligned_buffer(nbytes: int) -> memoryview:
    """Page-aligned memory of at least ``nbytes``, in whole blocks."""
    buffer = mmap.mmap(-1, _aligned(nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        buffer.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(buffer)


def _aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a multiple of ``DIRECT_ALIGNMENT``."""
    return -(-nbytes // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
