"""This rank's end of its writer process: start it, hand it jobs, notice when it dies."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.writer.pace import Pace
from trainer.checkpoint.writer.progress import END, Filled, line_of

POLL_S = 0.2


class WriteFailed(Exception):
    """The files of this rank are not on disk; the message says why."""


class WriterClient:
    """Spawned, never forked: a fork would carry CUDA's and gloo's threads' locks along. Started
    anew after a death.
    """

    def __init__(self, buffers: Sequence[int], disk: str) -> None:
        self._buffers = tuple(buffers)
        self._disk = disk
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def pid(self) -> int | None:
        """The process, while it lives."""
        return (
            self._process.pid
            if self._process is not None and self._process.poll() is None
            else None
        )

    def start(self) -> None:
        """Spawn it unless it lives."""
        if self.pid is not None:
            return
        home = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (home, *sys.path) if p)
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "trainer.checkpoint.writer.process",
                self._disk,
                *map(str, self._buffers),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self._buffers,
            env={**os.environ, "PYTHONPATH": path},
        )

    def write(
        self,
        folder: Path,
        files: Sequence[FileSpec],
        *,
        buffer: int,
        size: int,
        timeout_s: float,
        filled: Filled,
        pace: Pace,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, list[object]]:
        """The files, durable: name -> [bytes, [xxh3 of each chunk]], written as the buffer is
        ``filled``, at ``pace``.

        Raises WriteFailed: a disk error, a dead writer, a copy that failed, out of time.
        """
        self.start()
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise WriteFailed("the writer process can't be started")
        job = {
            "folder": str(folder),
            "buffer": buffer,
            "size": size,
            "files": [(f.path, f.start, f.length) for f in files],
        }
        until, late = time.monotonic() + timeout_s, f"the disk took longer than {timeout_s:.0f} s"
        self._tell(process, json.dumps(job).encode() + b"\n")
        known = 0
        pace.begin(size)
        while known < size:
            now = filled.beyond(known, POLL_S)
            if now > known:
                now = pace.next(known, now)
                self._tell(process, line_of(now))
            elif filled.failed or cancelled() or time.monotonic() > until:
                self._abandon(process)
                raise WriteFailed("the copy to host memory did not end")
            known = now
        answer = json.loads(self._line(process, until, late, cancelled))
        if "error" in answer:
            raise WriteFailed(answer["error"])
        pace.end()
        records: dict[str, list[object]] = answer["records"]
        return records

    def stop(self, timeout_s: float = 5.0) -> None:
        """End it: at once when idle, else after ``timeout_s``."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.write(END)
                process.stdin.close()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            # A process that waits for a dead disk can't even be killed: don't wait for it for ever.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        if process.stdout is not None:
            process.stdout.close()

    def _tell(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            raise self._died(process) from error

    def _line(
        self,
        process: subprocess.Popen[bytes],
        until: float,
        late: str,
        cancelled: Callable[[], bool],
    ) -> bytes:
        assert process.stdout is not None
        data, fd = b"", process.stdout.fileno()
        ready = (
            select.poll()
        )  # select() refuses descriptors from 1024 on, which a long run may have open
        ready.register(fd, select.POLLIN)
        while not data.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or cancelled():
                self._abandon(process)
                raise WriteFailed(late if left <= 0 else "given up at the end")
            if not ready.poll(min(left, POLL_S) * 1000):
                continue
            piece = os.read(fd, 1 << 20)
            if not piece:
                raise self._died(process)
            data += piece
        return data

    def _died(self, process: subprocess.Popen[bytes]) -> WriteFailed:
        """Its pipes end a moment before the kernel tells how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        return WriteFailed(f"the writer process died (exit code {process.returncode})")

    def _abandon(self, process: subprocess.Popen[bytes]) -> None:
        """It may come back to life and answer an old job: never talk to it again, and let it not
        write on.
        """
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        self._process = None
