"""Rows of JSON files. Those of JSONL stay on disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import UserError, first_line
from trainer.base.opened_file import OpenedFile

Row = dict[str, Any]
"""Field -> value."""
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
"""The escape of a surrogate: two of them are one character, a single one is none."""


def _require_whole_characters(row: Any, location: str) -> None:
    """Raises UserError for a text that is no Unicode and that no tokenizer takes."""
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(error.object[error.start]):04x}"
        raise UserError(
            f"{location}: the escape {code} is half of a character (a lone surrogate); write the "
            "whole one, or remove the row"
        ) from None


class JsonLines:
    """One JSON object per line. Blank lines are passed over. Costs 24 bytes of memory per row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = OpenedFile(path)
        self._starts, self._stops, self._lines = _lines(self.source)

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, i: int) -> int:
        """Line number, from 1."""
        return int(self._lines[i])

    def read(self, i: int) -> Row:
        """Parse line ``i``. Raises UserError, also when the file was rewritten meanwhile."""
        self.source.require_unchanged()
        start = int(self._starts[i])
        line = self.source.read(start, int(self._stops[i]) - start)
        location = f"{self.path}, row {self.number(i)}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as e:
            raise UserError(f"{location}: not valid JSON ({first_line(e)})") from e
        if _HALF_CHARACTER.search(line):
            _require_whole_characters(row, location)
        if not isinstance(row, dict):
            raise UserError(
                f"{self.path}, row {self.number(i)}: a JSON object per line is wanted, found "
                f"{type(row).__name__}"
            )
        return row

    def fields(self) -> list[str]:
        """Fields of the first row."""
        return list(self.read(0)) if len(self) else []


def _lines(
    source: OpenedFile,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Byte offsets of the beginnings and ends of the lines that aren't blank, and their numbers
    from 1.
    """
    size = source.size
    ends: list[np.ndarray[Any, Any]] = []
    for start in range(0, size, 64 << 20):
        block = np.frombuffer(source.read(start, 64 << 20), dtype=np.uint8)
        ends.append(np.flatnonzero(block == 10).astype(np.int64) + start)
    newlines = np.concatenate(ends)
    starts = np.concatenate([[0], newlines + 1]).astype(np.int64)
    stops = np.concatenate([newlines, [size]]).astype(np.int64)
    full = stops > starts
    # Only a short line can be blank in practice.
    short = np.flatnonzero(full & (stops - starts < 64))
    for k in short:
        start = int(starts[k])
        full[k] = bool(source.read(start, int(stops[k]) - start).strip())
    return starts[full], stops[full], np.flatnonzero(full) + 1


class Json:
    """A JSON array of objects. Held in memory: use JSONL or Parquet for large data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.source = OpenedFile(path)
        text = self.source.read(0, self.source.size)
        try:
            rows = json.loads(text)
        except (ValueError, RecursionError) as e:
            hint = (
                "; one object per line belongs in a .jsonl file" if "Extra data" in str(e) else ""
            )
            raise UserError(f"{path} is not valid JSON ({first_line(e)}){hint}") from e
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise UserError(
                f"{path}: a JSON array of objects is wanted, found {type(rows).__name__}"
            )
        if _HALF_CHARACTER.search(text):
            for position, row in enumerate(rows):
                _require_whole_characters(row, f"{path}, row {position}")
        self._rows: list[Row] = rows

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, i: int) -> int:
        """Position in the array, from 0."""
        return i

    def read(self, i: int) -> Row:
        """Object ``i``."""
        return self._rows[i]

    def fields(self) -> list[str]:
        """Fields of the first object."""
        return list(self._rows[0]) if self._rows else []
