"""The files of a run folder that the jobs side writes. Plain JSON, standard library only: also read
inside the image.

``job.json``                  how the run was launched (written at submit, replaced by a resubmit)
``attempts.jsonl``            one line per attempt that has ended
``logs/attempt_N/begin.json`` written when an attempt starts; beside it lie the ranks' logs and
                              their records of begin and end (trainer/base/rank_records.py)
``cancel.json``               left by ``python -m jobs cancel``: which launch was cancelled
``refused.jsonl``             jobs that found the folder owned by another launch, and did nothing
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.run_folder import log_folder, read_json_lines


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line, under the lock of :func:`append_lines`."""
    append_lines(path, [value])


def append_lines(path: Path, values: Iterable[Any]) -> None:
    """Append JSON lines with a single write under a lock, so that lines of several writers never
    mix.
    """
    text = "".join(
        json.dumps(value, separators=(",", ":"), sort_keys=True) + "\n" for value in values
    ).encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        # Some shared file systems have no locks; O_APPEND alone must do there.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        while text:
            text = text[os.write(descriptor, text) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def note_cancelled(run: Path, launch: str) -> None:
    """Remember that this launch was cancelled: the queue forgets it at once, and accounting learns
    of it later.
    """
    if run.is_dir():
        atomic.write_json(run / "cancel.json", {"launch": launch, "time": time.time()})


def note_refused(run: Path, launch: str, why: str) -> None:
    """Remember why a job of this launch did nothing."""
    append_line(run / "refused.jsonl", {"launch": launch, "why": why, "time": time.time()})


def refused(run: Path, launch: str) -> str:
    """Why the job of this launch did nothing; empty when it was not refused."""
    lines = read_json_lines(run / "refused.jsonl")
    return next((str(line.get("why")) for line in lines if line.get("launch") == launch), "")


def attempts(run: Path) -> list[dict[str, Any]]:
    """The attempts of a run that have ended, oldest first."""
    return read_json_lines(run / "attempts.jsonl", ("cause", "why"))


def newest_write(run: Path, attempt: int) -> float:
    """When the run or this attempt's logs were last written to, time.time(); 0.0 when there is
    nothing.
    """
    files = [
        run / METRICS_FILE,
        run / "attempts.jsonl",
        *log_folder(run, attempt).glob("*"),
    ]
    newest = 0.0
    for path in files:
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return newest
