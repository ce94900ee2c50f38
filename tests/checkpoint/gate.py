"""A disk that the test opens. By itself in a module without torch: the writer process imports
it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from trainer.checkpoint.store.disk import Bytes, Disk

GATE = "PLIMSOLL_GATE"


class GateDisk(Disk):
    """Writes nothing until the gate is open; fails when ``fail`` stands on it."""

    def write(self, path: Path, data: Bytes) -> list[str]:
        gate, until = Path(os.environ[GATE]), time.monotonic() + 200
        while not gate.exists() and time.monotonic() < until:
            time.sleep(0.002)
        if gate.read_text() == "fail":
            raise OSError(28, "No space left on device")
        return super().write(path, data)
