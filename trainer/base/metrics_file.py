"""``metrics.jsonl``: the record of a run, one JSON object a line, whole lines only."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TIMING_PREFIXES = (
    "timing/",
    "perf/",
    "cost/",
    "speed/",
    "ckpt/",
    "goodput/",
    "time",
    "batch/plan_ms",
)
"""Keys that differ between two runs of the same work; all others are equal after a resume."""
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_plain(value: Any) -> float | int | bool | str | None:
    """A metric as JSON can hold it: 0-d tensors and arrays become numbers. Raises TypeError for
    anything bigger.
    """
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()  # raises for more than one element
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a metric is a number or a text, not {type(value).__name__}")


def encode(record: Mapping[str, Any]) -> str:
    """One line of strict JSON; NaN and infinities become the texts ``NaN``, ``Infinity``,
    ``-Infinity``.
    """
    safe = {
        k: _spell(v) if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in record.items()
    }
    return json.dumps(safe, allow_nan=False, ensure_ascii=False)


def _spell(value: float) -> str:
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def decode(line: str) -> dict[str, Any] | None:
    """The record of a line, or None for one that a crash cut short."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    return {k: _WORDS.get(v, v) if isinstance(v, str) else v for k, v in record.items()}


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a ``metrics.jsonl`` in order; lines that a crash cut short are passed over."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if (record := decode(line)) is not None:
                yield record


def by_step(path: Path) -> dict[int, dict[str, Any]]:
    """All metrics of each step, later lines winning, steps in rising order."""
    merged: dict[int, dict[str, Any]] = {}
    for record in read_metrics(path):
        merged.setdefault(record["step"], {}).update(record)
    return dict(sorted(merged.items()))


def newest(path: Path, name: str, tail_bytes: int = 1 << 20) -> float | None:
    """The last number of metric ``name``, looked for in the last ``tail_bytes`` of the record."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    values = (record.get(name) for line in reversed(lines) if (record := decode(line)) is not None)
    return next((float(value) for value in values if isinstance(value, int | float)), None)


class MetricsFile:
    """Appends whole lines. On a resume, what came after the restored step is cut off first.

    The steps after the restored one are done again and log again, so the file of a resumed run
    equals that of an uninterrupted one in every key outside :data:`TIMING_PREFIXES`, provided a
    step is logged before its checkpoint is committed (:meth:`sync` makes it durable).
    """

    def __init__(self, path: Path, steps_done: int | None) -> None:
        """``steps_done``: the restored step; None keeps all that was written whole."""
        if path.exists():
            _cut(path, steps_done)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line in one system call, so that a killed process leaves it whole or not at
        all.
        """
        data = (encode(record) + "\n").encode()
        written = os.write(self._fd, data)
        while written < len(
            data
        ):  # a disk that fills up: try the rest, so that the error is raised
            written += os.write(self._fd, data[written:])

    def sync(self) -> None:
        """Make what was appended survive a power cut."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        os.close(self._fd)


def _cut(path: Path, steps_done: int | None) -> None:
    """Keep the whole lines of steps up to ``steps_done`` (none at all when nothing was restored,
    all for None).
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    kept = [
        line
        for line in lines
        if line.endswith("\n")
        and (r := decode(line)) is not None
        and (steps_done is None or (steps_done > 0 and r["step"] <= steps_done))
    ]
    if len(kept) == len(lines):
        return
    temporary = path.with_name(path.name + ".tmp")
    with open(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
