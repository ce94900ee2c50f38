"""Training steps while the trainer's own writer process writes without a pause.

One save is over before a whole step has lain beside it, so here the writer gets one job after
another: the same bytes into new files, with checksums and fsync, deleted behind it, at the pace of
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
from trainer.checkpoint.writer.pace import Pace
from trainer.checkpoint.writer.progress import Filled

DISK = "trainer.checkpoint.store.disk:Disk"
LIMIT_S = 300.0


class Writing:
    """Within: the writer is at work."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._folder, self._nbytes = folder, nbytes
        self._buffer = HostBuffer(nbytes, pinned=False)
        self._buffer.data.random_(0, 255)
        self._client = WriterClient([self._buffer.fd], DISK)
        self._pace = Pace(CheckpointSettings().write_share)
        self._stop, self._begun = threading.Event(), threading.Event()
        self._thread = threading.Thread()

    def __enter__(self) -> Writing:
        self._stop.clear()
        self._begun.clear()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self._begun.wait(LIMIT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pace.hurry()
        self._thread.join(LIMIT_S)
        self._pace.ease()

    def write(self) -> None:
        """One save: the first at full speed, as in a run, the others at the pace of a run."""
        target = self._folder / "beside"
        target.mkdir(mode=0o700)
        filled = Filled()
        filled.advance(self._nbytes)
        self._client.write(
            target,
            [FileSpec("state", 0, self._nbytes)],
            buffer=0,
            size=self._nbytes,
            timeout_s=LIMIT_S,
            filled=filled,
            pace=self._pace,
        )
        shutil.rmtree(target)

    def close(self) -> None:
        self._client.stop()
        self._buffer.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._begun.set()
            self.write()


def slowdown(
    step: Callable[[], None], folder: Path, nbytes: int, *, rounds: int, steps: int
) -> list[float]:
    """One figure a round: the median of ``steps`` steps beside the writer in that of as many
    without it.
    """
    writing = Writing(folder, nbytes)
    found = []
    try:
        writing.write()
        for _ in range(rounds):
            plain = statistics.median(timed(step) for _ in range(steps))
            with writing:
                found.append(statistics.median(timed(step) for _ in range(steps)) / plain)
    finally:
        writing.close()
    return found
