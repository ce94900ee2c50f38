"""Where ranks write their logs, and the end of them."""

from __future__ import annotations

from pathlib import Path

from trainer.base.run_folder import last_attempt, log_folder, log_tail


def log_file(run: Path, attempt: int, rank: int) -> Path:
    """The log of a rank of an attempt."""
    return log_folder(run, attempt) / f"rank_{rank}.log"


def tail_of(run: Path, lines: int = 15) -> str:
    """The last lines of the newest attempt's logs, indented."""
    folder = log_folder(run, last_attempt(run))
    logs = sorted(folder.glob("rank_*.log"), key=_size, reverse=True)
    # The launcher's log ends with the error of the rank that failed first.
    for path in [*folder.glob("launcher.log"), *logs]:
        text = log_tail(path, lines).strip("\n")
        if text:
            return "\n".join(f"  {line}" for line in text.splitlines())
    return f"  no log in {folder}" if last_attempt(run) else "  it never started"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
