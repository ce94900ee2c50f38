"""A disk that writes only when the test lets it. Without torch: the writer process imports it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.file_writing import FileContents

GATE = "PLIMSOLL_GATE"
"""Variable with the path of the gate: a file that the test makes."""


class GateDisk(Disk):
    """Writes nothing until the gate exists; fails while its text is ``fail``."""

    def write(self, path: Path, data: FileContents) -> list[str]:
        gate = Path(os.environ[GATE])
        deadline = time.monotonic() + 200
        while not gate.exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        if gate.read_text() == "fail":
            raise OSError(28, "No space left on device")
        return super().write(path, data)
