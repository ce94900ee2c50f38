"""Whether a process of this machine still lives."""

from __future__ import annotations

from pathlib import Path


def process_start(pid: int) -> int:
    """When a process of this machine started, in clock ticks since boot (proc(5)): tells it from a
    later one with its number. 0 when there is none, or when it has ended and nobody has noticed.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return 0 if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return 0
