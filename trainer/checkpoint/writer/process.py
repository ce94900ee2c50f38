"""The writer process: files from shared memory to the disk, one job at a time, at low priority.

It never imports torch, so it starts in a tenth of a second and takes 15 MB. Each rank has its own;
the ranks of a node write in parallel. Jobs and answers are JSON lines on its standard streams. It
ends with the line ``END``, or when its input ends: with its rank.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.checkpoint.store.commit import FileSpec, write_files
from trainer.checkpoint.store.disk import Disk, load_disk
from trainer.checkpoint.writer.progress import FillingBuffer, jobs, lines_until_end

NICENESS = 10
IGNORED_SIGNALS = (
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
)
"""A warning signal reaches the whole process group; the save it leads to is written here."""


def main(disk_spec: str, *fds: str) -> int:
    """Serve jobs until the end of the input. ``fds``: descriptors of the host buffers."""
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    disk = load_disk(disk_spec)
    buffers = _MappedBuffers([int(fd) for fd in fds])
    lines = lines_until_end(sys.stdin)
    for job in jobs(lines):
        try:
            answer = _write(job, disk, buffers, lines)
        except EOFError:
            break
        try:
            os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            break  # the rank died in the meantime
    return 0


class _MappedBuffers:
    """The host buffers in this process's memory, mapped anew after one has grown."""

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds
        self._maps: dict[int, mmap.mmap] = {}

    def get(self, number: int, size: int) -> mmap.mmap:
        """The buffer ``number``, at least ``size`` bytes of it."""
        mapped = self._maps.get(number)
        if mapped is None or len(mapped) < size:
            fd = self._fds[number]
            mapped = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
            self._maps[number] = mapped
        return mapped


def _write(
    job: dict[str, Any], disk: Disk, buffers: _MappedBuffers, lines: Iterator[str]
) -> dict[str, Any]:
    """Write the files of ``job``. Raises EOFError when the rank is gone."""
    files = [FileSpec(*spec) for spec in job["files"]]
    try:
        data = memoryview(buffers.get(job["buffer"], job["size"]))
        records = write_files(disk, Path(job["folder"]), files, FillingBuffer(data, lines))
    except OSError as error:
        return {"error": f"{error.strerror or error} ({job['folder']})", "errno": error.errno}
    return {"records": records}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
