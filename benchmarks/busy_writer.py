"""Training steps while the trainer's own writer process writes without a pause.

One save is over before a whole step has run during it, so here the writer gets one job after
another: the same bytes into new files, with checksums and fsync, deleted afterwards, at the pace of
a run's second save and all later ones.
"""

from __future__ import annotations

import shutil
import statistics
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import timed
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot.host_buffer import HostBuffer
from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.writer.client import WriterClient
from trainer.checkpoint.writer.progress import FillProgress
from trainer.checkpoint.writer.throttle import WriteThrottle

DISK = "trainer.checkpoint.store.disk:Disk"
LIMIT_S = 300.0


class BusyWriter:
    """A context in which the trainer's writer process writes ``nbytes`` again and again."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder, self._nbytes = folder, nbytes
        self._buffer = HostBuffer(nbytes, pinned=False)
        self._buffer.data.random_(0, 255)
        self._client = WriterClient([self._buffer.fd], DISK)
        self._throttle = WriteThrottle(CheckpointSettings().write_share)
        self._stop, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread()

    def __enter__(self) -> BusyWriter:
        self._stop.clear()
        self._begun.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._begun.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._throttle.suspend()
        self._thread.join(LIMIT_S)
        self._throttle.resume()

    def write(self) -> None:
        """One save: the first at full speed, as in a run, the others at the pace of a run."""
        target = self._folder / "busy_writer"
        target.mkdir(mode=0o700)
        progress = FillProgress()
        progress.advance(self._nbytes)
        self._client.write(
            target,
            [FileSpec("state", 0, self._nbytes)],
            buffer=0,
            size=self._nbytes,
            timeout_s=LIMIT_S,
            progress=progress,
            throttle=self._throttle,
        )
        shutil.rmtree(target)

    def close(self) -> None:
        """Stop the process and free its buffer."""
        self._client.stop()
        self._buffer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._begun.set()
            self.write()


def slowdown(
    step: Callable[[], None], folder: Path, nbytes: int, *, rounds: int, steps: int
) -> list[float]:
    """Step time while the writer is busy, in multiples of step time without it, by round.

    Both are medians of ``steps`` steps.
    """
    writer = BusyWriter(folder, nbytes)
    ratios = []
    try:
        writer.write()
        for _ in range(rounds):
            plain = statistics.median(timed(step) for _ in range(steps))
            with writer:
                ratios.append(statistics.median(timed(step) for _ in range(steps)) / plain)
    finally:
        writer.close()
    return ratios
