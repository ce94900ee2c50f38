"""Logs of ranks, over attempts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.run_folder import last_attempt, log_folder
from trainer.launch.report import tail


def log_file(run: Path, attempt: int, rank: int) -> Path:
    """Where a rank of an attempt writes."""
    return log_folder(run, attempt) / f"rank_{rank}.log"


def tail_of(run: Path, lines: int = 15) -> str:
    """The last lines of the newest attempt's logs, indented: what a failed job said."""
    folder = log_folder(run, last_attempt(run))
    logs = sorted(folder.glob("rank_*.log"), key=lambda path: path.stat().st_size, reverse=True)
    for path in [
        *folder.glob("launcher.log"),
        *logs,
    ]:  # the launcher's ends with the error of the rank that failed first
        if text := tail(path, lines).strip("\n"):
            return "\n".join(f"  {line}" for line in text.splitlines())
    return f"  no log in {folder}" if last_attempt(run) else "  it never started"


def show(run: Path, attempt: int, rank: int, lines: int) -> int:
    """The last ``lines`` lines. Raises UserError naming the logs there are."""
    path = log_file(run, attempt, rank)
    if not path.exists():
        there = sorted(str(p.relative_to(run)) for p in run.glob("logs/attempt_*/*.log"))
        raise UserError(f"there is no {path}; there are: {', '.join(there) or 'no logs yet'}.")
    text = path.read_text(errors="replace").splitlines(keepends=True)
    sys.stdout.write("".join(text[-lines:]))
    return 0


def follow(run: Path, rank: int, lines: int, ended: Callable[[], bool], poll_s: float = 0.5) -> int:
    """Print a log as it grows and go on with the next attempt's, until ``ended`` says that no more
    will come.
    """
    attempt, place, quiet = max(1, last_attempt(run)), -1, 0
    while True:
        path = log_file(run, attempt, rank)
        grown = False
        if path.exists():
            with path.open(errors="replace") as file:
                if place < 0:
                    sys.stdout.write("".join(file.readlines()[-lines:]))
                else:
                    file.seek(place)
                    sys.stdout.write(file.read())
                grown, place = file.tell() != place, file.tell()
                sys.stdout.flush()
        if grown:
            quiet = 0
            continue
        if last_attempt(run) > attempt:
            attempt, place = attempt + 1, 0
            sys.stdout.write(f"--- attempt {attempt} ---\n")
            continue
        quiet += 1
        if quiet % 10 == 4 and ended():
            return 0
        time.sleep(poll_s)
