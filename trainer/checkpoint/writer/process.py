"""The writer process: files from shared memory to the disk, one job at a time, at low priority. It
never loads torch, so that it starts in a tenth of a second and costs 15 MB; each rank has its own,
and the ranks of a node write in parallel.

Jobs and answers are JSON lines on its standard streams. It ends when it is told to, or its input
ends: with its rank.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import sys
from pathlib import Path
from typing import Any

from trainer.checkpoint.store.commit import FileSpec, write_files
from trainer.checkpoint.store.disk import load_disk
from trainer.checkpoint.writer.progress import Arriving, jobs, until_end

NICENESS = 10


def main(disk_spec: str, *fds: str) -> int:
    """Serve jobs until the end of the input. ``fds``: the host buffers' descriptors."""
    # A warning signal goes to the whole process group; the save it asks for is this process's to
    # write.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    disk = load_disk(disk_spec)
    maps: dict[int, mmap.mmap] = {}
    lines = until_end(sys.stdin)
    for job in jobs(lines):
        try:
            data = Arriving(memoryview(_mapped(maps, int(fds[job["buffer"]]), job["size"])), lines)
            files = [FileSpec(*spec) for spec in job["files"]]
            answer: dict[str, Any] = {
                "records": write_files(disk, Path(job["folder"]), files, data)
            }
        except EOFError:
            break
        except OSError as error:
            answer = {"error": f"{error.strerror or error} ({job['folder']})", "errno": error.errno}
        try:
            os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
        except BrokenPipeError:
            break  # the rank died in the meantime
    return 0


def _mapped(maps: dict[int, mmap.mmap], fd: int, size: int) -> mmap.mmap:
    known = maps.get(fd)
    if known is None or len(known) < size:
        known = maps[fd] = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
    return known


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
