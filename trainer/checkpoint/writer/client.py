"""This rank's end of its writer process: start it, give it jobs, notice when it dies."""

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
from trainer.checkpoint.writer.progress import END, FillProgress, progress_line
from trainer.checkpoint.writer.throttle import WriteThrottle

POLL_S = 0.2


class WriteError(Exception):
    """The files of this rank are not on disk; the message says why."""


class WriterClient:
    """Starts the writer process, and starts it again after it died.

    The process is spawned, never forked: a fork would inherit the locks of CUDA's and gloo's
    threads.
    """

    def __init__(self, buffer_fds: Sequence[int], disk_spec: str) -> None:
        """``disk_spec``: the disk class, see ``trainer.checkpoint.store.disk.load_disk``."""
        self._buffer_fds = tuple(buffer_fds)
        self._disk_spec = disk_spec
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Spawn the process unless it is alive."""
        if self._process is not None and self._process.poll() is None:
            return
        source_root = str(Path(__file__).resolve().parents[3])
        python_path = os.pathsep.join(path for path in (source_root, *sys.path) if path)
        module = "trainer.checkpoint.writer.process"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, self._disk_spec, *map(str, self._buffer_fds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=self._buffer_fds,
            env={**os.environ, "PYTHONPATH": python_path},
        )

    def write(
        self,
        folder: Path,
        files: Sequence[FileSpec],
        *,
        buffer: int,
        size: int,
        timeout_s: float,
        progress: FillProgress,
        throttle: WriteThrottle,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> dict[str, list[object]]:
        """Write and sync ``files`` from ``buffer`` (its number), while the buffer is being filled.

        Returns name -> [bytes, [xxh3 of each chunk]]. Raises WriteError: a disk error, a dead
        writer, a failed copy, out of time.
        """
        self.start()
        process = self._process
        if process is None:
            raise WriteError("the writer process can't be started")
        job = {
            "folder": str(folder),
            "buffer": buffer,
            "size": size,
            "files": [(spec.path, spec.start, spec.length) for spec in files],
        }
        wait = _Wait(timeout_s, cancelled)
        self._send(process, json.dumps(job).encode() + b"\n")
        throttle.start_save(size)
        self._send_progress(process, size, progress, throttle, wait)
        answer = json.loads(self._read_line(process, wait))
        if "error" in answer:
            raise WriteError(answer["error"])
        throttle.finish_save()
        records: dict[str, list[object]] = answer["records"]
        return records

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the process: at once when it is idle, else by force after ``timeout_s``."""
        process = self._process
        self._process = None
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
            # A process that waits for a dead disk can't even be killed: don't wait for it forever.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        if process.stdout is not None:
            process.stdout.close()

    def _send_progress(
        self,
        process: subprocess.Popen[bytes],
        size: int,
        progress: FillProgress,
        throttle: WriteThrottle,
        wait: _Wait,
    ) -> None:
        """Tell the process how far the buffer is filled until all ``size`` bytes are in place."""
        released = 0
        while released < size:
            available = progress.wait_for_more(released, POLL_S)
            if available > released:
                released = throttle.release(released, available)
                self._send(process, progress_line(released))
            elif progress.failure or wait.is_over:
                self._kill(process)
                raise WriteError(progress.failure or "the copy to host memory did not end")

    def _send(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except OSError as error:
            raise self._death(process) from error

    def _read_line(self, process: subprocess.Popen[bytes], wait: _Wait) -> bytes:
        assert process.stdout is not None
        fd = process.stdout.fileno()
        # poll(), since select() refuses descriptors from 1024 on, which a long run may have open.
        ready = select.poll()
        ready.register(fd, select.POLLIN)
        data = b""
        while not data.endswith(b"\n"):
            if wait.is_over:
                self._kill(process)
                raise WriteError(wait.reason)
            if not ready.poll(min(wait.left_s, POLL_S) * 1000):
                continue
            received = os.read(fd, 1 << 20)
            if not received:
                raise self._death(process)
            data += received
        return data

    def _death(self, process: subprocess.Popen[bytes]) -> WriteError:
        """The error for a process whose pipe has ended, a moment before its exit code is known."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        return WriteError(f"the writer process died (exit code {process.returncode})")

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill and forget the process: it must neither write on nor answer an old job later."""
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
        self._process = None


class _Wait:
    """The time limit of one job, and whether the caller has cancelled it."""

    def __init__(self, timeout_s: float, cancelled: Callable[[], bool]) -> None:
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether the time is over or the caller has cancelled."""
        return self.left_s <= 0 or self._cancelled()

    @property
    def reason(self) -> str:
        """Why the wait is over."""
        if self.left_s <= 0:
            return f"the disk took longer than {self._timeout_s:.0f} s"
        return "given up at the end"
