"""Random access to the rows of a file. Rows stay on disk: JSONL and Arrow are mapped, Parquet
through a spool file.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.base.errors import UserError

Row = dict[str, Any]


class Table(Protocol):
    """Rows of one file. Forked processes share its pages."""

    path: Path

    def __len__(self) -> int: ...

    def read(self, i: int) -> Row:
        """Row ``i``. Raises UserError naming file and row when it can't be read."""
        ...

    def number(self, i: int) -> int:
        """How messages name row ``i``: its line (from 1) in JSONL, its position (from 0)
        elsewhere.
        """
        ...

    def fields(self) -> list[str]:
        """Names of the fields, those of the first row in JSON."""
        ...


def open_table(path: Path) -> Table:
    """The table of a file, by its suffix. Raises UserError when the file is damaged or holds
    something else.
    """
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if path.suffix == ".json":
        return Json(path)
    try:
        return ArrowRows(path, _spooled(path) if path.suffix == ".parquet" else _mapped(path))
    except pa.ArrowInvalid as e:
        raise UserError(
            f"{path} is not a valid {path.suffix[1:].capitalize()} file: {_first_line(e)}"
        ) from e
    except (OSError, pa.ArrowException) as e:
        raise UserError(f"{path} can't be read: {_first_line(e)}") from e


class JsonLines:
    """One JSON object per line. Blank lines are passed over. Costs 16 bytes of memory per row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as f:
            self._text = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
        self._starts, self._lines = _line_starts(self._text)

    def __len__(self) -> int:
        return len(self._starts)

    def number(self, i: int) -> int:
        """Line number, from 1."""
        return int(self._lines[i])

    def read(self, i: int) -> Row:
        """Parse line ``i``."""
        start = int(self._starts[i])
        end = self._text.find(b"\n", start)
        line = self._text[start : end if end >= 0 else len(self._text)]
        try:
            row = json.loads(line)
        except ValueError as e:
            raise UserError(
                f"{self.path}, row {self.number(i)}: not valid JSON ({_first_line(e)})"
            ) from e
        if not isinstance(row, dict):
            raise UserError(
                f"{self.path}, row {self.number(i)}: a JSON object per line is wanted, found "
                f"{type(row).__name__}"
            )
        return row

    def fields(self) -> list[str]:
        """Fields of the first row."""
        return list(self.read(0)) if len(self) else []


def _line_starts(text: mmap.mmap) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Byte offsets of the lines that aren't blank, and their numbers from 1."""
    size = len(text)
    ends: list[np.ndarray[Any, Any]] = []
    for start in range(0, size, 64 << 20):
        block = np.frombuffer(text[start : start + (64 << 20)], dtype=np.uint8)
        ends.append(np.flatnonzero(block == 10).astype(np.int64) + start)
    newlines = np.concatenate(ends)
    starts = np.concatenate([[0], newlines + 1]).astype(np.int64)
    stops = np.concatenate([newlines, [size]])
    full = stops > starts
    short = np.flatnonzero(
        full & (stops - starts < 64)
    )  # only a short line can be blank in practice
    for k in short:
        full[k] = bool(text[int(starts[k]) : int(stops[k])].strip())
    return starts[full], np.flatnonzero(full) + 1


class Json:
    """A JSON array of objects. Held in memory: use JSONL or Parquet for large data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            rows = json.loads(path.read_bytes())
        except ValueError as e:
            hint = (
                "; one object per line belongs in a .jsonl file" if "Extra data" in str(e) else ""
            )
            raise UserError(f"{path} is not valid JSON ({_first_line(e)}){hint}") from e
        if not isinstance(rows, list) or not all(isinstance(r, dict) for r in rows):
            raise UserError(
                f"{path}: a JSON array of objects is wanted, found {type(rows).__name__}"
            )
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


class ArrowRows:
    """Rows of an Arrow table."""

    def __init__(self, path: Path, table: Any) -> None:
        self.path = path
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def number(self, i: int) -> int:
        """Position in the file, from 0."""
        return i

    def read(self, i: int) -> Row:
        """Row ``i`` as Python values."""
        row: Row = self._table.slice(i, 1).to_pylist()[0]
        return row

    def fields(self) -> list[str]:
        """Column names."""
        return list(self._table.schema.names)


def _mapped(path: Path) -> Any:
    """An Arrow file in either format: ``datasets`` writes the stream format, others the file
    format.
    """
    with path.open("rb") as f:
        file_format = f.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    return (pa.ipc.open_file(source) if file_format else pa.ipc.open_stream(source)).read_all()


def _spooled(path: Path) -> Any:
    """A Parquet file unpacked, batch by batch, into an unlinked Arrow file that is then mapped.

    Parquet can't be read row by row; unpacking it into memory would cost that memory once per rank
    and worker.
    """
    source = pq.ParquetFile(path, memory_map=True)
    handle, name = tempfile.mkstemp(prefix="plimsoll-", suffix=".arrow")
    os.close(handle)
    try:
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_file(sink, source.schema_arrow) as writer:
            for batch in source.iter_batches(batch_size=1024):
                writer.write_batch(batch)
        return pa.ipc.open_file(pa.memory_map(name)).read_all()
    except OSError as e:
        if e.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(
            f"{path} can't be unpacked into {tempfile.gettempdir()}: {_first_line(e)}; set TMPDIR "
            "to a folder with room"
        ) from e
    finally:
        os.unlink(name)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
