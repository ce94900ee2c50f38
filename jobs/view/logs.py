"""``python -m jobs logs``: the log of a rank, over all attempts."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jobs.rank_logs import log_file
from trainer.base.errors import UserError
from trainer.base.json_files import open_regular
from trainer.base.run_folder import last_attempt


def show(run: Path, attempt: int, rank: int, lines: int) -> int:
    """Print the last ``lines`` lines of a log. Raises UserError that names the logs there are."""
    path = log_file(run, attempt, rank)
    if not path.exists():
        present = sorted(str(p.relative_to(run)) for p in run.glob("logs/attempt_*/*.log"))
        raise UserError(f"there is no {path}; there are: {', '.join(present) or 'no logs yet'}.")
    with _opened(path) as file:
        sys.stdout.write(_last_lines(file, lines))
    return 0


def follow(run: Path, rank: int, lines: int, ended: Callable[[], bool], poll_s: float = 0.5) -> int:
    """Print a log as it grows, over all attempts, until ``ended`` says that no more will come."""
    attempt = max(1, last_attempt(run))
    offset: int | None = None
    quiet_polls = 0
    while True:
        path = log_file(run, attempt, rank)
        if path.exists():
            end = _print_from(path, offset, lines)
            grown = end != offset
            offset = end
            if grown:
                quiet_polls = 0
                continue
        if last_attempt(run) > attempt:
            attempt += 1
            offset = 0
            sys.stdout.write(f"--- attempt {attempt} ---\n")
            continue
        quiet_polls += 1
        if quiet_polls % 10 == 4 and ended():
            return 0
        time.sleep(poll_s)


def _print_from(path: Path, offset: int | None, lines: int) -> int:
    """Print a file from ``offset``, or its last ``lines`` lines for None. Returns its end."""
    with _opened(path) as file:
        if offset is None:
            sys.stdout.write(_last_lines(file, lines))
        else:
            file.seek(offset)
            sys.stdout.write(file.read().decode(errors="replace"))
        sys.stdout.flush()
        return file.tell()


def _opened(path: Path) -> BinaryIO:
    """The log. Raises UserError for something else in its place."""
    try:
        return open_regular(path)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): it is no log file") from error


def _last_lines(file: BinaryIO, lines: int) -> str:
    """The last ``lines`` lines of a file of any size."""
    return b"".join(deque(file, maxlen=lines)).decode(errors="replace")
