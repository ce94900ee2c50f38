"""Disks that kill the process, that fail, and that record what was done."""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.file_writing import FileContents


class CrashDisk(Disk):
    """A disk on which the process may end before each operation, and halfway through a long one.

    Each such point is an instant. ``PLIMSOLL_CRASH`` = rank,n: SIGKILL for all processes of the
    group at the n-th instant of that rank. Prints the name of each instant as it is reached.
    """

    reached = 0
    """Instants that this process has reached, on the training's disk and the writer's."""

    def __init__(self) -> None:
        rank, crash_at = os.environ.get("PLIMSOLL_CRASH", "-1,-1").split(",")
        self._is_watched = int(rank) == int(os.environ["RANK"])
        self._crash_at = int(crash_at)

    def instant(self, name: str, halfway: Callable[[], object] = lambda: None) -> None:
        """Run ``halfway`` and kill the group if this is the instant to crash at."""
        if not self._is_watched:
            return
        os.write(1, f"instant {_short(name)}\n".encode())
        if CrashDisk.reached == self._crash_at:
            halfway()
            os.killpg(0, signal.SIGKILL)
        CrashDisk.reached += 1

    def makedirs(self, path: Path) -> None:
        # Of several ranks any may be the first to make a folder.
        if os.environ["WORLD_SIZE"] == "1" and not path.exists():
            self.instant(f"mkdir {_inside(path)}")
        super().makedirs(path)

    def write(self, path: Path, data: FileContents) -> list[str]:
        self.instant(f"write {_inside(path)}")
        half = data[: len(data) // 2]
        self.instant(
            f"write half of {_inside(path)}", lambda: super(CrashDisk, self).write(path, half)
        )
        return super().write(path, data)

    def fsync(self, path: Path) -> None:
        self.instant(f"fsync {_inside(path)}")
        super().fsync(path)

    def fsync_dir(self, path: Path) -> None:
        self.instant(f"fsync folder {_inside(path)}")
        super().fsync_dir(path)

    def rename(self, old: Path, new: Path) -> None:
        self.instant(f"rename {_inside(old)} to {_inside(new)}")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self.instant(f"unlink {_inside(path)}")
        super().unlink(path)

    def rmtree(self, path: Path) -> None:
        if path.exists():
            self.instant(f"remove {_inside(path)}")
            self.instant(f"remove half of {_inside(path)}", lambda: _remove_half(path))
        super().rmtree(path)


class CrashStore:
    """A file system of fsspec with such instants.

    Halves of a file exist only in a plain folder: an object appears whole or not at all.
    """

    def __init__(self, inner: Any, disk: CrashDisk) -> None:
        self._inner = inner
        self._disk = disk
        self._is_folder = "file" in inner.protocol

    def put_file(self, source: str, target: str) -> None:
        name = _inside(Path(target))
        self._disk.instant(f"upload {name}")
        if self._is_folder:
            self._disk.instant(f"upload half of {name}", lambda: _copy_half(source, target))
        self._inner.put_file(source, target)

    def get_file(self, source: str, target: str) -> None:
        name = _inside(Path(source))
        self._disk.instant(f"download {name}")
        if self._is_folder:
            self._disk.instant(f"download half of {name}", lambda: _copy_half(source, target))
        self._inner.get_file(source, target)

    def rm(self, path: str, recursive: bool = False) -> None:
        name = _inside(Path(path))
        self._disk.instant(f"remove from the mirror {name}")
        if self._is_folder:
            self._disk.instant(
                f"remove from the mirror half of {name}", lambda: _remove_half(Path(path))
            )
        self._inner.rm(path, recursive=recursive)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _inside(path: Path) -> str:
    """The path below the folder of checkpoints."""
    parts = path.parts
    for home in ("checkpoints", "mirror"):
        if home in parts:
            parts = parts[parts.index(home) :]
            return "/".join(parts[1:]) or parts[0]
    return path.name


def _short(name: str) -> str:
    """The name without the fence, which is random."""
    return re.sub(r"\.tmp-[^/ ]*", ".tmp", name)


def _copy_half(source: str, target: str) -> None:
    data = Path(source).read_bytes()
    Path(target).write_bytes(data[: len(data) // 2])


def _remove_half(folder: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    for path in files[: len(files) // 2]:
        path.unlink()


class FaultyDisk(Disk):
    """A disk that fails as a file says: ``PLIMSOLL_FAULT`` names it, without it all is well.

    Its text is ``ENOSPC write``: that error from each operation of that name, a write after half of
    it; ``ENOENT rename done``: the error though the operation was done; ``die``: a write ends the
    process; ``hang``: a write never returns.
    """

    def makedirs(self, path: Path) -> None:
        self._fail("mkdir", path)
        super().makedirs(path)

    def write(self, path: Path, data: FileContents) -> list[str]:
        fault = self._fault()
        if fault == ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == ["hang"]:
            time.sleep(3600)
        elif fault[1:] == ["write"]:
            super().write(path, data[: len(data) // 2])
            self._fail("write", path)
        return super().write(path, data)

    def fsync(self, path: Path) -> None:
        self._fail("fsync", path)
        super().fsync(path)

    def fsync_dir(self, path: Path) -> None:
        self._fail("fsync_dir", path)
        super().fsync_dir(path)

    def rename(self, old: Path, new: Path) -> None:
        self._fail("rename", new)
        super().rename(old, new)
        if self._fault()[1:] == ["rename", "done"]:
            raise self._error(new)

    def rmtree(self, path: Path) -> None:
        self._fail("rmtree", path)
        super().rmtree(path)

    def _fail(self, operation: str, path: Path) -> None:
        if self._fault()[1:] == [operation]:
            raise self._error(path)

    def _fault(self) -> list[str]:
        try:
            return Path(os.environ["PLIMSOLL_FAULT"]).read_text().split()
        except FileNotFoundError:
            return []

    def _error(self, path: Path) -> OSError:
        number = getattr(errno, self._fault()[0])
        return OSError(number, os.strerror(number), str(path))


class SmallDisk(Disk):
    """A disk that holds as many bytes as a file says: ``PLIMSOLL_ROOM`` names it.

    Its text is ``1000 100``: the bytes of the run folder, and those that ``statvfs`` shows to be
    free at least (a quota is not seen there).
    """

    def write(self, path: Path, data: FileContents) -> list[str]:
        if len(data) > self._limits()[0] - _used():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return super().write(path, data)

    def free_bytes(self, path: Path) -> int:
        capacity, shown = self._limits()
        return max(capacity - _used(), shown)

    def _limits(self) -> tuple[int, int]:
        capacity, shown = Path(os.environ["PLIMSOLL_ROOM"]).read_text().split()
        return int(capacity), int(shown)


def _used() -> int:
    """Bytes of all files in the folder of checkpoints beside the file of ``SmallDisk``."""
    used = 0
    for path in Path(os.environ["PLIMSOLL_ROOM"]).parent.rglob("checkpoints/**/*"):
        try:
            used += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # removed meanwhile
            continue
    return used


@dataclass(frozen=True)
class Operation:
    """One recorded operation; ``other`` is the new name of a rename."""

    kind: str
    path: Path
    other: Path | None = None
    data: bytes = b""


class TraceDisk(Disk):
    """A disk that records its operations. ``without``: the number of an fsync that is left out."""

    def __init__(self, without: int | None = None) -> None:
        self.trace: list[Operation] = []
        self.fsyncs = 0
        self._without = without

    def makedirs(self, path: Path) -> None:
        missing = []
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            super().makedirs(folder)
            self.trace.append(Operation("mkdir", folder))

    def write(self, path: Path, data: FileContents) -> list[str]:
        self.trace.append(Operation("write", path, data=bytes(data)))
        return super().write(path, data)

    def fsync(self, path: Path) -> None:
        self._record_fsync(Operation("fsync", path))

    def fsync_dir(self, path: Path) -> None:
        self._record_fsync(Operation("fsync_dir", path))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.trace.append(Operation("rename", old, new))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self.trace.append(Operation("unlink", path))

    def rmtree(self, path: Path) -> None:
        if not path.exists():
            return
        for file in sorted(path.rglob("*"), reverse=True):
            if file.is_dir():
                file.rmdir()
            else:
                file.unlink()
            self.trace.append(Operation("unlink", file))
        path.rmdir()
        self.trace.append(Operation("unlink", path))

    def mark(self, text: str) -> None:
        """Record what has been promised to the run by now."""
        self.trace.append(Operation("mark", Path(text)))

    def _record_fsync(self, operation: Operation) -> None:
        self.fsyncs += 1
        if self.fsyncs - 1 != self._without:
            self.trace.append(operation)
