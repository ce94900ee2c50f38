"""Make the W&B run again from ``metrics.jsonl``: ``python -m trainer.tracking.rebuild RUN
[--online] [--new-id]``.

``--online`` sends what the server lacks of the run, which is what ``python -m jobs sync`` calls:
every line of the record is sent once, however often it is called. Otherwise a new offline folder
with all steps is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.base import caches
from trainer.base.command import run_command
from trainer.base.errors import EXIT_OK, UserError
from trainer.base.metrics_file import METRICS_FILE, by_step
from trainer.base.run_folder import DISPLAY_NAME, read_json
from trainer.config import load_frozen
from trainer.tracking.wandb_rows import RunRecord
from trainer.tracking.wandb_run import (
    WandbIdentity,
    WandbRun,
    load_or_create_identity,
    random_run_id,
)


def rebuild(
    run_dir: Path, *, online: bool = False, new_id: bool = False
) -> tuple[Path | None, int, str]:
    """Send what the server lacks of the run (``online``), or write a folder with all of it.

    Returns the W&B folder (None when W&B failed), the number of rows and the run id. ``new_id``:
    use another id than the run's, for a page of its own. Raises :class:`UserError` when the folder
    has no record or no config.
    """
    record = run_dir / METRICS_FILE
    config_path = run_dir / "config.yaml"
    for path in (record, config_path):
        if not path.is_file():
            raise UserError(
                f"{path} doesn't exist: give the folder of a run (it holds config.yaml and "
                "metrics.jsonl)."
            )
    config = load_frozen(run_dir, complete=False).model_dump()
    identity = _identity(run_dir, config)
    if new_id:
        identity = replace(identity, id=random_run_id())
    completes = online and not new_id
    wandb_run = WandbRun(
        run_dir,
        config,
        identity=identity,
        mode="online" if online else "offline",
        folder=_fresh_folder(run_dir),
        record=RunRecord(run_dir) if completes else None,
        fallback=False,
    )
    if not completes:
        for step, metrics in by_step(record).items():
            values = {key: value for key, value in metrics.items() if key not in ("step", "time")}
            wandb_run.log(step, values)
    folder = wandb_run.folder
    wandb_run.finish(0)
    return folder, wandb_run.sent_rows, identity.id


def _identity(run_dir: Path, config: dict[str, Any]) -> WandbIdentity:
    trainer: dict[str, Any] = config.get("trainer") or {}
    return load_or_create_identity(
        run_dir,
        project=str(trainer.get("project_name") or "plimsoll"),
        name=str(
            read_json(run_dir / "job.json").get(DISPLAY_NAME)
            or trainer.get("experiment_name")
            or run_dir.name
        ),
    )


def _fresh_folder(run_dir: Path) -> Path:
    folder = run_dir / "wandb_rebuilt"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.tracking.rebuild", description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--online", action="store_true", help="send to the server what it lacks")
    parser.add_argument(
        "--new-id", action="store_true", help="a run of its own beside the one with the run's id"
    )
    options = parser.parse_args(arguments)
    caches.prepare(options.run)
    folder, rows, run_id = rebuild(options.run, online=options.online, new_id=options.new_id)
    if folder is None:
        return 1
    if options.online:
        sys.stdout.write(f"{rows} rows sent to W&B run {run_id}\n")
    else:
        sys.stdout.write(f"{rows} steps as W&B run {run_id} in {folder}\n")
        sys.stdout.write(f"Send it from a machine with a network: wandb sync {folder}\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
