"""Offline W&B folders to the server: every attempt has its own, and they must go in attempt
order.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import UserError

TIMEOUT_S = 600


def offline_folders(run: Path) -> list[Path]:
    """The run's ``offline-run-TIME-ID`` folders, oldest first: the time in their name is the
    attempt's start.
    """
    return sorted(
        (path for path in run.glob("**/offline-run-*") if path.is_dir()), key=lambda path: path.name
    )


def sync_runs(runs: Sequence[Path], *, dry_run: bool) -> int:
    """``wandb sync`` every folder, after the first of a run with ``--append``. 1 when one failed.

    A run stops at its first failure: a later attempt must not overtake an earlier one. Raises
    UserError when there is no offline folder.
    """
    failed = 0
    folders = 0
    for run in runs:
        for number, folder in enumerate(offline_folders(run)):
            folders += 1
            command = [
                sys.executable,
                "-m",
                "wandb",
                "sync",
                *(["--append"] if number else []),
                str(folder),
            ]
            sys.stdout.write(" ".join(command) + "\n")
            if dry_run:
                continue
            try:
                code = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
            except subprocess.TimeoutExpired:
                code = 124
            if code:
                sys.stderr.write(f"wandb sync failed with exit code {code} on {folder}\n")
                failed += 1
                break
    if not folders:
        raise UserError(
            "no offline W&B folder in these runs: they were online, or trainer.logger has no wandb."
        )
    return 1 if failed else 0
