"""A rank that records a step and then waits: for a signal, or for the file ``go`` in its run
folder.

What a test does to the run then comes in time, however busy the machine is. ``HELD_AT`` in the
environment: the step.
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

HELD_AT, GO = "PLIMSOLL_TEST_HELD_AT", "go"
LONGEST_S = 400.0


def main(run_dir: Path) -> int:
    append = MetricsFile.append

    def held(self: MetricsFile, record: Mapping[str, Any]) -> None:
        append(self, record)
        until = time.monotonic() + LONGEST_S
        while (
            record["step"] == int(os.environ[HELD_AT])
            and signals.requested() is None
            and not (run_dir / GO).exists()
        ):
            assert time.monotonic() < until
            time.sleep(0.01)

    MetricsFile.append = held  # type: ignore[method-assign]
    return worker.main(run_dir)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
