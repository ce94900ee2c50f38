"""Runs to the W&B server and to their other loggers, from their own records."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.run_folder import WANDB_IDENTITY, loggers_of, send_command, upload_command

TIMEOUT_S = 600


def sync_runs(runs: Sequence[Path], *, dry_run: bool) -> int:
    """Send what W&B's server and the other loggers lack of every run's ``metrics.jsonl``. 1 when
    one failed.

    What is sent follows from the record, not from W&B's folders of the attempts: those hold the
    steps that were taken again twice, and lack what W&B had not written when an attempt was killed.
    Raises UserError when no run has anything to send.
    """
    failed = 0
    commands = [(run, command) for run in runs for command in _commands_of(run)]
    if not commands:
        raise UserError(
            "these runs have nothing to send: no step is done, or trainer.logger has neither "
            "wandb nor another logger."
        )
    for run, command in commands:
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


def _commands_of(run: Path) -> list[list[str]]:
    if not (run / METRICS_FILE).is_file():
        return []
    commands = [send_command(run, name, sys.executable) for name in loggers_of(run)]
    if (run / WANDB_IDENTITY).is_file():
        commands.insert(0, upload_command(run, sys.executable))
    return commands
