"""The end of an attempt that is asked to stop before its first update. No torch."""

from __future__ import annotations

import sys
from pathlib import Path

from trainer.base import metrics_file, rank_records
from trainer.base.errors import EXIT_REQUEUE
from trainer.base.metrics_file import METRICS_FILE


def leave_untrained(run_dir: Path, cause: str) -> int:
    """Record and say that this rank ends before the first update; return the exit code.

    What the attempt restored is whole, so nothing is saved, and no other rank is needed.
    """
    rank = rank_records.task_number()
    folder = rank_records.attempt_folder(run_dir)
    if folder is not None:
        rank_records.write_end(
            folder,
            rank,
            kind=rank_records.STOPPED,
            exit_code=EXIT_REQUEUE,
            step=metrics_file.last_step(run_dir / METRICS_FILE) or 0,
            stop=cause,
        )
    if rank == 0:
        sys.stdout.write(
            f"Asked to stop ({cause}) before the first update of this attempt: there is nothing to "
            "save. The same command goes on from the last checkpoint.\n"
        )
        sys.stdout.flush()
    return EXIT_REQUEUE
