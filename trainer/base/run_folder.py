"""Where a run folder keeps its attempts, and how its JSON records are read. Standard library only:
the batch script reads them too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``, or an empty one when there is none or it is torn."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a JSON-lines file; a torn last line is skipped."""
    try:
        text = path.read_text()
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def log_folder(run: Path, attempt: int) -> Path:
    """Where the ranks of an attempt (counted from 1) write."""
    return run / "logs" / f"attempt_{attempt}"


def last_attempt(run: Path) -> int:
    """The number of the newest attempt that has begun; 0 before the first."""
    numbers = [int(p.name[8:]) for p in (run / "logs").glob("attempt_*") if p.name[8:].isdigit()]
    return max(numbers, default=0)
