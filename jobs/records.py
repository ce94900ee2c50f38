"""The files of a run folder that the jobs side writes. Plain JSON, standard library only: also read
inside the image.

``job.json``                  how the run was launched (written at submit, replaced by a resubmit)
``attempts.jsonl``            one line per attempt that has ended
``logs/attempt_N/begin.json`` written when an attempt starts; the log of every rank lies beside it
``exit.json``                 left by the trainer: cause, step, attempt
``cancel.json``               left by ``python -m jobs cancel``: which launch was cancelled
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.base.run_folder import log_folder, read_lines


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` in one step (a reader sees the old or the new text), readable by its owner
    alone.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(descriptor, "w") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(name, path)


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line, see :func:`append_lines`."""
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
        with contextlib.suppress(
            OSError
        ):  # some shared file systems have no locks; O_APPEND has to do there
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
        write_json(run / "cancel.json", {"launch": launch, "time": time.time()})


def attempts(run: Path) -> list[dict[str, Any]]:
    """The attempts of a run that have ended, oldest first."""
    return read_lines(run / "attempts.jsonl")


def newest_write(run: Path, attempt: int) -> float:
    """When the run or this attempt's logs were last written to, time.time(); 0.0 when there is
    nothing.
    """
    files = [
        run / "metrics.jsonl",
        run / "attempts.jsonl",
        run / "exit.json",
        *log_folder(run, attempt).glob("*"),
    ]
    found = 0.0
    for path in files:
        with contextlib.suppress(OSError):
            found = max(found, path.stat().st_mtime)
    return found


def process_start(pid: int) -> int:
    """When a process of this machine started, in clock ticks since boot (proc(5)): tells it from a
    later one with its number. 0 when there is none.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
