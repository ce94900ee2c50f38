"""Files of a run folder that both the trainer and the jobs package read.

Standard library only: the batch script outside the image reads them too.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from trainer.base import atomic


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is none or a crash cut it short."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of all whole lines of a JSON-lines file; empty when there is none."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    objects = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


def log_folder(run: Path, attempt: int) -> Path:
    """The folder for the logs of all ranks of an attempt (counted from 1)."""
    return run / "logs" / f"attempt_{attempt}"


def last_attempt(run: Path) -> int:
    """The number of the newest attempt that has begun; 0 before the first."""
    names = [path.name.removeprefix("attempt_") for path in (run / "logs").glob("attempt_*")]
    return max((int(name) for name in names if name.isdigit()), default=0)


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
        with log.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"(its log can't be read: {error})"
    return "\n".join(text.splitlines()[-lines:])


def write_exit_record(run_dir: Path, *, cause: str, step: int, attempt: int) -> None:
    """Write ``exit.json``: why this attempt ended, for the batch script outside the image."""
    value = {"cause": cause, "step": step, "attempt": attempt, "time": time.time()}
    atomic.write_json(run_dir / "exit.json", value)
