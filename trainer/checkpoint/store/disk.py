"""Every effect of the commit protocol on the disk, a method each, so that faults and power cuts can
be injected.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import mmap
import os
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from xxhash import xxh3_128

CHUNK = 8 << 20
"""Bytes per write call through the page cache: large enough for the disk, small enough to be hashed
from the cache.
"""
BLOCK = 4096
"""What a write past the page cache begins at and is a multiple of, in the file and in memory."""
PIECE = 1 << 20
"""Bytes copied and hashed at a time before such a write: they stay in the cache in between."""
DIRECT = 16 << 20
"""Files from this size on are written past the page cache."""
CHECKED = 64 << 20
"""Bytes under one checksum, from the beginning of a file on: damage is told by the chunk, and ranks
share a file.
"""
FLUSH_EVERY = 64 << 20
"""Bytes after which the kernel is told to start writing back, so that the final fsync doesn't wait
for all of them.
"""


class Bytes(Protocol):
    """Memory, or what is still on its way there: a slice of it is there."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> memoryview: ...


class Disk:
    """The real one. Folders are made 0700 and files 0600. Every method raises OSError as the system
    does.
    """

    def makedirs(self, path: Path) -> None:
        """``path`` and its parents; no error when it is there."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, path: Path, data: Bytes) -> list[str]:
        """A new file with ``data``, not yet durable. Returns the xxh3-128 in hex of each
        ``CHECKED`` bytes, taken from memory.
        """
        fd, direct = _open(path, len(data))
        with open(fd, "wb", buffering=0):
            return _write_past_cache(fd, data) if direct else _write_through_cache(fd, data)

    def fsync(self, path: Path) -> None:
        """Make the contents of a file durable."""
        self._sync(path, os.O_RDONLY)

    def fsync_dir(self, path: Path) -> None:
        """Make the names inside a folder durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic within a file system; replaces a file, never a folder with something in it."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file; no error when it is gone."""
        path.unlink(missing_ok=True)

    def rmtree(self, path: Path) -> None:
        """Remove a folder and all in it; no error when it is gone."""
        shutil.rmtree(path, ignore_errors=False) if path.exists() else None

    def _sync(self, path: Path, flags: int) -> None:
        fd = os.open(path, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _open(path: Path, nbytes: int) -> tuple[int, bool]:
    """A new file; True when it is written past the page cache. That spares the step that is running
    the kernel's writing it back, which has no regard to this process's priority.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    if nbytes >= DIRECT:
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that knows no such way
                raise
    return os.open(path, flags, 0o600), False


def _write_past_cache(fd: int, data: Bytes) -> list[str]:
    """Through two areas of huge pages, one filled and hashed while the other is written: of small
    pages a disk takes many short requests, and half as many bytes a second.
    """
    digests, size = [], len(data)
    areas = [_area(min(CHECKED, size)) for _ in range(2)]
    with ThreadPoolExecutor(1) as writer:
        written: Future[None] | None = None
        for number, start in enumerate(range(0, size, CHECKED)):
            area, length = areas[number % 2], min(CHECKED, size - start)
            digest = xxh3_128()
            for first in range(0, length, PIECE):
                piece = area[first : min(first + PIECE, length)]
                piece[:] = data[start + first : start + first + len(piece)]
                digest.update(piece)
            digests.append(digest.hexdigest())
            if written is not None:
                written.result()
            written = writer.submit(_put, fd, area[: -(-length // BLOCK) * BLOCK], start)
        if written is not None:
            written.result()
    os.ftruncate(fd, size)  # the last block may be filled up
    return digests


def _area(nbytes: int) -> memoryview:
    """Memory of whole blocks that begins at one."""
    area = mmap.mmap(-1, -(-nbytes // BLOCK) * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(area)


def _put(fd: int, data: memoryview, offset: int) -> None:
    while len(data):
        try:
            done = os.pwrite(fd, data, offset)
        except OSError as error:
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # a file system with larger blocks
            continue
        data, offset = data[done:], offset + done


def _write_through_cache(fd: int, data: Bytes) -> list[str]:
    digests = [xxh3_128() for _ in range(0, len(data), CHECKED)]
    flushed = 0
    for start in range(0, len(data), CHUNK):
        piece = data[start : start + CHUNK]
        digests[start // CHECKED].update(piece)
        _put(fd, piece, start)
        if start + CHUNK - flushed >= FLUSH_EVERY:
            _start_writeback(fd, flushed, start + CHUNK - flushed)
            flushed = start + CHUNK
    return [digest.hexdigest() for digest in digests]


def _start_writeback(fd: int, offset: int, length: int) -> None:
    # fadvise(DONTNEED) starts write-back of dirty pages without waiting; the pages stay until they
    # are clean.
    os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def load_disk(spec: str) -> Disk:
    """The disk named ``module:class``."""
    module, name = spec.split(":")
    disk: Disk = getattr(importlib.import_module(module), name)()
    return disk


def digest_of(path: Path, start: int = 0, length: int | None = None) -> str:
    """xxh3-128 in hex of ``length`` bytes of a file from ``start`` on; of fewer where it ends, of
    all when None.
    """
    digest = xxh3_128()
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = path.stat().st_size - start if length is None else length
        while left > 0 and (piece := file.read(min(CHUNK, left))):
            digest.update(piece)
            left -= len(piece)
    return digest.hexdigest()
