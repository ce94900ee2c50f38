"""A worker that records a step and then waits for a signal, or for ``go`` in its run folder.

A test can then interrupt the run in time, however busy the machine is. The environment variable
``PLIMSOLL_TEST_HELD_AT`` sets the step.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer import worker
from trainer.base import signals
from trainer.base.metrics_file import MetricsFile

HELD_AT = "PLIMSOLL_TEST_HELD_AT"
GO = "go"
MAX_WAIT_S = 400.0


def main(run_dir: Path) -> int:
    append = MetricsFile.append

    def append_and_wait(self: MetricsFile, record: Mapping[str, Any]) -> None:
        append(self, record)
        deadline = time.monotonic() + MAX_WAIT_S
        while (
            record["step"] == int(os.environ[HELD_AT])
            and signals.requested() is None
            and not (run_dir / GO).exists()
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    MetricsFile.append = append_and_wait  # type: ignore[method-assign]
    return worker.main(run_dir)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
