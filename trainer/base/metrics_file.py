"""``metrics.jsonl``, the record of a run: one JSON object a line. The only reader and writer of it.

Standard library only: the batch script on the login node reads it too.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.full_disk import WAIT_S, patiently
from trainer.base.json_files import (
    MAX_LINE_BYTES,
    is_count,
    is_number,
    is_text,
    open_regular,
    parse_object,
    split_lines,
)

METRICS_FILE = "metrics.jsonl"
TAIL_BYTES = 1 << 16
"""How much of the end of a file is read for its newest values: some dozens of steps, within a
millisecond, since ``jobs status`` does so for every run.
"""
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
"""Prefixes of the metrics that differ between two runs of the same work; all others are equal after
a resume.
"""
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_plain(value: Any) -> float | int | bool | str | None:
    """A metric as JSON can hold it; 0-d tensors and arrays become numbers.

    Raises TypeError for anything with more than one element.
    """
    if hasattr(value, "item") and not isinstance(value, (int, float)):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a metric is a number or a text, not {type(value).__name__}")


def encode(record: Mapping[str, Any]) -> str:
    """One line of strict JSON, in which NaN and infinities are the texts ``NaN``, ``Infinity`` and
    ``-Infinity``.
    """
    values = {key: _spell_not_finite(value) for key, value in record.items()}
    return json.dumps(values, allow_nan=False, ensure_ascii=False)


def decode(line: str | bytes) -> dict[str, Any] | None:
    """The record of a line, with NaN and infinities as numbers again.

    None for a line that a crash cut short and for one without a step.
    """
    record = parse_object(line)
    if record is None or not is_count(record.get("step")):
        return None
    values = {
        key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
        for key, value in record.items()
    }
    return {key: value for key, value in values.items() if _is_metric(value)}


def read_metrics(path: Path, start: int = 0) -> Iterator[dict[str, Any]]:
    """The records of a file from byte ``start`` on, in order; lines that a crash cut short are
    passed over.

    There are none when the file is missing or can't be read.
    """
    for line, _ in split_lines(path, start):
        record = None if len(line) > MAX_LINE_BYTES else decode(line)
        if record is not None:
            yield record


def read_tail(path: Path, tail_bytes: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The records in the last ``tail_bytes`` of a file, in order; empty when there is no file."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - tail_bytes))
            lines = file.read(tail_bytes).split(b"\n")
    except (OSError, ValueError):
        return []
    records = (decode(line) for line in lines)
    return [record for record in records if record is not None]


def by_step(path: Path) -> dict[int, dict[str, Any]]:
    """All metrics of each step in rising order; of a step that was repeated the newest values."""
    merged: dict[int, dict[str, Any]] = {}
    for record in read_metrics(path):
        merged.setdefault(record["step"], {}).update(record)
    return dict(sorted(merged.items()))


def last_values(path: Path) -> dict[str, Any]:
    """The newest value of each metric, as far as the end of the file has it."""
    merged: dict[str, Any] = {}
    for record in read_tail(path):
        merged.update(record)
    return merged


def last_value(path: Path, name: str, tail_bytes: int = 1 << 20) -> float | None:
    """The newest number of metric ``name`` in the end of the file; None when it has none."""
    for record in reversed(read_tail(path, tail_bytes)):
        value = record.get(name)
        if isinstance(value, int | float):
            return float(value)
    return None


def last_step(path: Path) -> int | None:
    """The step of the last whole line; None when there is none."""
    records = read_tail(path)
    return int(records[-1]["step"]) if records else None


@dataclass(frozen=True)
class ReplacedSteps:
    """Steps that an earlier attempt took and that this one takes again."""

    first: int
    last: int
    file: Path
    """Where their lines are kept."""


def replaced_file(path: Path, attempt: int) -> Path:
    """Where the lines are kept that ``attempt`` removes from the record ``path``."""
    return path.with_name(f"{path.stem}.before_attempt_{attempt}{path.suffix}")


class MetricsFile:
    """Appends whole lines. On a resume, what came after the restored step is set aside first.

    The steps after the restored one are taken again and logged again, so the file of a resumed run
    equals that of an uninterrupted one in every key outside :data:`TIMING_PREFIXES`, provided a
    step is logged before its checkpoint is committed (:meth:`sync` makes it durable). The lines of
    the first time are moved, not lost: attempt N keeps them in ``metrics.before_attempt_N.jsonl``.
    """

    def __init__(self, path: Path, steps_done: int | None, *, attempt: int = 1) -> None:
        """``steps_done``: the restored step; None keeps every whole line. ``attempt``: the number
        of this attempt.
        """
        self.replaced: ReplacedSteps | None = None
        """The steps whose lines were moved; None when there were none."""
        if path.exists():
            self.replaced = _set_aside(path, steps_done, replaced_file(path, attempt))
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.start = os.fstat(self._fd).st_size
        """The byte at which the lines of this attempt begin."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line with one system call: a killed process leaves all of it or nothing.

        Waits while the disk is full (``patiently``), then raises OSError.
        """
        data = (encode(record) + "\n").encode()
        while data:
            # A disk that fills up takes a part; the next call gets the error.
            data = data[patiently(partial(os.write, self._fd, data), str(self._path)) :]

    def sync(self) -> None:
        """Make what was appended survive a power cut. Waits as ``append`` does."""
        patiently(partial(os.fsync, self._fd), str(self._path))

    def close(self) -> None:
        """Sync and close."""
        self.sync()
        os.close(self._fd)


def _set_aside(path: Path, steps_done: int | None, aside: Path) -> ReplacedSteps | None:
    """Move the lines of steps after ``steps_done`` to ``aside``: all for 0, none for None.

    Half a line, which a crash left, is dropped.
    """
    with io.TextIOWrapper(open_regular(path), encoding="utf-8", errors="replace") as file:
        lines = file.readlines()
    kept = []
    moved = []
    steps = []
    for line in lines:
        record = decode(line)
        if record is None or not line.endswith("\n"):
            continue
        if steps_done is None or (steps_done > 0 and record["step"] <= steps_done):
            kept.append(line)
        else:
            moved.append(line)
            steps.append(int(record["step"]))
    if moved:
        # First the copy: a kill between the two leaves a line twice, never nowhere.
        earlier = aside.read_text(encoding="utf-8") if aside.exists() else ""
        atomic.write_text(aside, earlier + "".join(moved), wait_s=WAIT_S)
    if len(kept) < len(lines):
        atomic.write_text(path, "".join(kept), wait_s=WAIT_S)
    return ReplacedSteps(min(steps), max(steps), aside) if moved else None


def _spell_not_finite(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def _is_metric(value: Any) -> bool:
    """Whether a value is one that :func:`encode` writes."""
    return isinstance(value, float | bool) or value is None or is_number(value) or is_text(value)
