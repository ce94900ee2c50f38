"""The callable that Submitit pickles for the node. It holds strings only, so that the two sides
need not share a version of any class.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import NoReturn

WORKER_MODULE = "PLIMSOLL_WORKER_MODULE"
"""The module that is a rank (tests put a small one here)."""


@dataclass(frozen=True)
class Rank:
    """One rank of the run in folder ``run``, started by srun once per GPU."""

    run: str

    def __call__(self) -> NoReturn:
        """Replace this process by the trainer, so that Slurm's signals reach it; they stay blocked
        until the trainer has its handlers.

        Submitit's own handlers and its requeue from rank 0 end here; the batch script does both.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        module = os.environ.get(WORKER_MODULE, "trainer.worker")
        os.execv(sys.executable, [sys.executable, "-m", module, self.run])  # noqa: S606
