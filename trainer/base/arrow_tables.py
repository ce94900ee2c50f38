"""Rows of Arrow and Parquet files, which stay on disk: Arrow is mapped, Parquet through a spool
file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trainer.base.errors import UserError, first_line
from trainer.base.json_tables import Row
from trainer.base.opened_file import OpenedFile


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Raises UserError, naming the file, for what Arrow raises inside."""
    try:
        yield
    except pa.ArrowInvalid as e:
        raise UserError(
            f"{path} is not a valid {path.suffix[1:].capitalize()} file: {first_line(e)}"
        ) from e
    except (OSError, pa.ArrowException, UnicodeDecodeError) as e:
        raise UserError(f"{path} can't be read: {first_line(e)}") from e


def open_arrow(path: Path) -> ArrowRows:
    """The table of an Arrow or Parquet file, by its suffix. Raises UserError when it is damaged."""
    source = OpenedFile(path)
    spooled = path.suffix == ".parquet"
    with named_errors(path):
        table = _spooled(path) if spooled else _mapped(path)
    if spooled:
        source.require_unchanged()  # the rows are in a file of this run's own from now on
    return ArrowRows(source, table, mapped=not spooled)


def first_rows(path: Path) -> Iterator[Row]:
    """The rows of a Parquet file from the first on, without unpacking it whole. Raises UserError
    when it is damaged.
    """
    with named_errors(path):
        batches = pq.ParquetFile(path).iter_batches(batch_size=256)
    while True:
        with named_errors(path):
            batch = next(batches, None)
            if batch is None:
                return
            rows: list[Row] = batch.to_pylist()
        yield from rows


def row_count(path: Path) -> int:
    """Rows of a Parquet file. Raises UserError when it is damaged."""
    with named_errors(path):
        return int(pq.ParquetFile(path).metadata.num_rows)


class ArrowRows:
    """Rows of an Arrow table."""

    def __init__(self, source: OpenedFile, table: Any, *, mapped: bool) -> None:
        """``mapped``: the table lies in ``source`` itself."""
        self.path = source.path
        self.source = source
        self._table = table
        self._mapped = mapped

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def number(self, i: int) -> int:
        """Position in the file, from 0."""
        return i

    def read(self, i: int) -> Row:
        """Row ``i`` as Python values. Raises UserError when the file was rewritten meanwhile."""
        if self._mapped:
            self.source.require_unchanged()
        with named_errors(self.source.path):
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
    source = pq.ParquetFile(path)
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
            f"{path} can't be unpacked into {tempfile.gettempdir()}: {first_line(e)}; set TMPDIR "
            "to a folder with room"
        ) from e
    finally:
        os.unlink(name)
