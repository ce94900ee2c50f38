"""Runs to the W&B server, from their own records."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.run_folder import WANDB_IDENTITY, upload_command

TIMEOUT_S = 600


def sync_runs(runs: Sequence[Path], *, dry_run: bool) -> int:
    """Send what the server lacks of every run's ``metrics.jsonl``. 1 when one failed.

    What is sent follows from the record, not from W&B's folders of the attempts: those hold the
    steps that were taken again twice, and lack what W&B had not written when an attempt was killed.
    Raises UserError when no run has anything for W&B.
    """
    failed = 0
    sendable = [run for run in runs if _has_rows(run)]
    if not sendable:
        raise UserError(
            "these runs have nothing for W&B: no step is done, or trainer.logger has no wandb."
        )
    for run in sendable:
        command = upload_command(run, sys.executable)
        sys.stdout.write(shlex.join(command) + "\n")
        sys.stdout.flush()
        if dry_run:
            continue
        try:
            code = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
        if code:
            sys.stderr.write(f"sync failed with exit code {code} on {run}\n")
            failed += 1
    return 1 if failed else 0


def _has_rows(run: Path) -> bool:
    return (run / WANDB_IDENTITY).is_file() and (run / METRICS_FILE).is_file()
