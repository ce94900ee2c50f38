"""Disks that crash, fail, and remember."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from trainer.checkpoint.disk import Disk


class CrashDisk(Disk):
    """Ends its process by SIGKILL at the n-th named point; ``PLIMSOLL_CRASH`` = n."""

    def __init__(self) -> None:
        self.left = int(os.environ["PLIMSOLL_CRASH"])

    def point(self, name: str) -> None:
        if self.left == 0:
            os.write(1, f"crash {name}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


class FaultyDisk(Disk):
    """``PLIMSOLL_FAULT`` names a file: while it exists, writes fail with the errno its text names, or by
    ``die``: the process ends; ``hang``: they never return; ``slow``: they take 0.2 s."""

    def write(self, path: Path, data: memoryview) -> list[str]:
        try:
            fault = Path(os.environ["PLIMSOLL_FAULT"]).read_text()
        except FileNotFoundError:
            return super().write(path, data)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "hang":
            time.sleep(3600)
        elif fault == "slow":
            time.sleep(0.2)
            return super().write(path, data)
        super().write(path, data[: len(data) // 2])
        raise OSError(getattr(errno, fault), os.strerror(getattr(errno, fault)), str(path))


@dataclass(frozen=True)
class Op:
    kind: str
    path: Path
    other: Path | None = None
    data: bytes = b""


class TraceDisk(Disk):
    """Does everything and keeps a trace. ``without``: the n-th fsync (of files and folders) is left out."""

    def __init__(self, without: int | None = None) -> None:
        self.trace: list[Op] = []
        self.fsyncs = 0
        self._without = without

    def makedirs(self, path: Path) -> None:
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            super().makedirs(folder)
            self.trace.append(Op("mkdir", folder))

    def write(self, path: Path, data: memoryview) -> list[str]:
        self.trace.append(Op("write", path, data=bytes(data)))
        return super().write(path, data)

    def fsync(self, path: Path) -> None:
        self._synced(Op("fsync", path))

    def fsync_dir(self, path: Path) -> None:
        self._synced(Op("fsync_dir", path))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.trace.append(Op("rename", old, new))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.trace.append(Op("unlink", path))

    def rmtree(self, path: Path) -> None:
        if not path.exists():
            return
        for file in sorted(path.rglob("*"), reverse=True):
            if file.is_dir():
                file.rmdir()
            else:
                file.unlink()
            self.trace.append(Op("unlink", file))
        path.rmdir()
        self.trace.append(Op("unlink", path))

    def mark(self, text: str) -> None:
        """What has been promised by now."""
        self.trace.append(Op("mark", Path(text)))

    def _synced(self, op: Op) -> None:
        self.fsyncs += 1
        if self.fsyncs - 1 != self._without:
            self.trace.append(op)
