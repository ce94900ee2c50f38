"""Which rows of a run's record its W&B run has.

W&B numbers the rows of a run and says, when the run is continued, how many it has. The journal
``<run>/wandb_rows.jsonl`` says which step each row was of, so that every line of ``metrics.jsonl``
is sent once, whatever ended an attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.base.file_lock import is_locked_by_another
from trainer.base.json_files import Fields, is_count, is_text, read_lines
from trainer.base.metrics_file import METRICS_FILE, read_metrics

JOURNAL_FILE = "wandb_rows.jsonl"
_FIELDS: Fields = {"id": is_text, "row": is_count, "step": is_count, "kind": is_text}
METRICS = "metrics"
TABLE = "table"
_ALL = 1 << 62
"""As the number of rows of a step: all that there may be."""


@dataclass(frozen=True)
class Row:
    """What one call of W&B's ``log`` takes: metrics of a step, or the rows of a table."""

    step: int
    kind: str
    """``metrics`` or ``table``."""
    values: Any


class RunRecord:
    """The lines of ``metrics.jsonl`` and the tables in ``generations/``."""

    def __init__(self, run_dir: Path, start: int = 0) -> None:
        """``start``: the byte of ``metrics.jsonl`` at which the lines of this attempt begin."""
        self.run_dir = run_dir
        self.start = start

    def rows(self, start: int = 0) -> Iterator[Row]:
        """The rows from byte ``start`` on, in order; the table of a step follows its first line."""
        with_table: set[int] = set()
        for line in read_metrics(self.run_dir / METRICS_FILE, start):
            step = int(line["step"])
            values = {key: value for key, value in line.items() if key not in ("step", "time")}
            yield Row(step, METRICS, values)
            if step not in with_table:
                with_table.add(step)
                table = read_lines(self.run_dir / "generations" / f"step_{step}.jsonl")
                if table:
                    yield Row(step, TABLE, table)


class SentRows:
    """The rows that the W&B run on the server has.

    Holds a lock on the journal: one process at a time continues a W&B run.
    """

    def __init__(self, run_dir: Path, run_id: str) -> None:
        """Raises BlockingIOError while another process sends rows of this run, OSError for a folder
        that can't be written.
        """
        self._run_id = run_id
        self._path = run_dir / JOURNAL_FILE
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if is_locked_by_another(self._fd):
            os.close(self._fd)
            raise BlockingIOError("another process is sending this run")
        self._next_row = 0
        self._sent: Counter[tuple[int, str]] = Counter()

    def begin(self, server_rows: int, server_step: int | None) -> None:
        """Take what the server says: the number of its rows, and the step of the last of them.

        Rows that are not in the journal (of another version or machine) count as all rows of all
        steps up to ``server_step``.
        """
        lines = [
            line
            for line in read_lines(self._path, _FIELDS, tuple(_FIELDS))
            if line["id"] == self._run_id and line["row"] < server_rows
        ]
        known = {line["row"]: (line["step"], line["kind"]) for line in lines}
        self._sent = Counter(known.values())
        self._next_row = server_rows
        if len(known) < server_rows and server_step is not None:
            for step in range(server_step + 1):
                for kind in (METRICS, TABLE):
                    self._sent[step, kind] = _ALL

    def has(self, step: int, kind: str, index: int) -> bool:
        """Whether the server has the row ``index`` (from 0) of this kind and step."""
        return index < self._sent[step, kind]

    def add(self, step: int, kind: str) -> None:
        """Note that a row has been handed to W&B."""
        line = {"id": self._run_id, "row": self._next_row, "step": step, "kind": kind}
        self._next_row += 1
        self._sent[step, kind] += 1
        with contextlib.suppress(OSError):  # a full disk: the row may be sent twice later
            os.write(self._fd, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Let other processes continue the W&B run."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
