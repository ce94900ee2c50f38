"""Every operation of the commit protocol on the file system, one method each.

Tests replace this class to inject faults and to record what a power cut may leave.
"""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

from trainer.checkpoint.store.file_writing import FileContents, write_new_file


class Disk:
    """The real file system. Makes folders with mode 0700 and files with 0600.

    Every method raises OSError as the system does.
    """

    def makedirs(self, path: Path) -> None:
        """Make ``path`` and its parents; no error when it exists."""
        path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, path: Path, data: FileContents) -> list[str]:
        """Write a new file, not yet durable.

        Returns the xxh3-128 in hex of each ``CHECKSUM_BYTES`` bytes, computed from memory.
        """
        return write_new_file(path, data)

    def fsync(self, path: Path) -> None:
        """Make the contents of a file durable."""
        self._sync(path, os.O_RDONLY)

    def fsync_dir(self, path: Path) -> None:
        """Make the names inside a folder durable."""
        self._sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Rename atomically within a file system; replaces a file, never a non-empty folder."""
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        """Remove a file; no error when it is gone."""
        path.unlink(missing_ok=True)

    def rmtree(self, path: Path) -> None:
        """Remove a folder and all in it; no error when it is gone."""
        if path.exists():
            shutil.rmtree(path, ignore_errors=False)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write to the file system of ``path``."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize

    def _sync(self, path: Path, flags: int) -> None:
        fd = os.open(path, flags)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def load_disk(spec: str) -> Disk:
    """An instance of the disk class named ``module:class``."""
    module, name = spec.split(":")
    disk: Disk = getattr(importlib.import_module(module), name)()
    return disk
