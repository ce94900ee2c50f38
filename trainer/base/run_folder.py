"""Files of a run folder that both the trainer and the jobs package read.

Standard library only: the batch script outside the image reads them too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.json_files import (
    Fields,
    is_budgets,
    is_count,
    is_number,
    is_text,
    is_texts,
    open_regular,
    optional,
    read_lines,
    read_object,
)

RECORD_FIELDS: Mapping[str, Fields] = {
    "attempts.jsonl": {
        "attempt": optional(is_count),
        "launch": optional(is_text),
        "job": optional(is_text),
        "nodes": optional(is_text),
        "start": optional(is_number),
        "end": optional(is_number),
        "cause": is_text,
        "why": is_text,
        "bad_nodes": is_texts,
    },
    "begin.json": {
        "attempt": is_count,
        "launch": optional(is_text),
        "job": is_text,
        "nodes": is_text,
        "restarts": is_count,
        "oom_kills": is_count,
        "pid": is_count,
        "pid_start": is_count,
        "start": is_number,
        "step": is_count,
    },
    "cancel.json": {"launch": is_text},
    "clock.json": {
        "start": is_number,
        "end": is_number,
        "undone_steps": is_count,
        "undone_s": is_number,
    },
    "owner.json": {
        "launch": is_text,
        "kind": is_text,
        "name": is_text,
        "job": is_text,
        "host": is_text,
        "pid": is_count,
        "pid_start": is_count,
        "since": is_number,
        "ended": is_number,
    },
    "lease.json": {"since": is_number},
    "refused.jsonl": {"launch": is_text, "why": is_text},
    "job.json": {
        "name": is_text,
        "display_name": is_text,
        "launch": is_text,
        "gpus": is_count,
        "ranks": is_count,
        "tasks": is_count,
        "limit_s": is_number,
        "signal_delay_s": is_number,
        "budgets": is_budgets,
    },
}
"""What the fields of a record have to hold, by the name of its file."""
DISPLAY_NAME = "display_name"
"""Field of ``job.json``: what trackers call the run of a sweep."""
LOGGERS_FOLDER = "loggers"
"""What the other loggers have of a run, and what their packages say."""
WANDB_IDENTITY = "wandb.json"
"""The W&B run that a run's metrics go to; a run that doesn't log to W&B has no such file."""
_ATTEMPT = re.compile(r"attempt_([0-9]{1,9})")


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, without fields that hold nothing usable; empty when there is none or
    a crash cut it short.
    """
    return read_object(path, RECORD_FIELDS.get(path.name))


def read_json_lines(path: Path, required: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The objects of all usable whole lines of a JSON-lines file that have the ``required`` fields;
    empty when there is none.
    """
    return read_lines(path, RECORD_FIELDS.get(path.name), required)


def log_folder(run: Path, attempt: int) -> Path:
    """The folder for the logs of all ranks of an attempt (counted from 1)."""
    return run / "logs" / f"attempt_{attempt}"


def last_attempt(run: Path) -> int:
    """The number of the newest attempt that has begun; 0 before the first."""
    try:
        names = os.listdir(run / "logs")
    except (OSError, ValueError):
        return 0
    matches = [_ATTEMPT.fullmatch(name) for name in names]
    return max((int(match[1]) for match in matches if match), default=0)


def new_attempt(run: Path) -> int:
    """Begin the next attempt: make its log folder and return its number."""
    (run / "logs").mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1 + last_attempt(run)
    while True:
        try:
            log_folder(run, number).mkdir(mode=0o700)
            return number
        except FileExistsError:  # another process has just begun an attempt
            number += 1


def log_tail(log: Path, lines: int = 40) -> str:
    """The last ``lines`` lines of a log; at most 64 KiB are read."""
    try:
        with open_regular(log) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read(65536).decode(errors="replace")
    except (OSError, ValueError) as error:
        return f"(its log can't be read: {error})"
    return "\n".join(text.splitlines()[-lines:])


def upload_command(run: Path, python: str = "python") -> list[str]:
    """The command that sends to W&B what its server lacks of a run, be it in a ledger or not."""
    return [python, "-m", "trainer.tracking.rebuild", str(run), "--online"]


def send_command(run: Path, logger: str, python: str = "python") -> list[str]:
    """The command that sends to a logger what it lacks of a run."""
    return [python, "-m", "trainer.tracking.loggers.follow", str(run), logger]


def loggers_of(run: Path) -> list[str]:
    """The loggers, besides W&B, that the run has sent metrics to, or tried to."""
    return sorted(path.stem for path in (run / LOGGERS_FOLDER).glob("*.jsonl"))
