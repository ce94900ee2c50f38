"""Data files that change while they are read: told at the next row, never a SIGBUS."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.base.data_tables import Table, open_table
from trainer.base.errors import UserError

ROWS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(2000)]
SUFFIXES = ["jsonl", "arrow", "parquet", "json"]


def write(path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)


def opened(path: Path) -> Table:
    write(path)
    table = open_table(path)
    table.source.digest()  # as a data set does
    assert table.read(1999) == ROWS[1999]
    return table


def other_content(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)  # opens with O_TRUNC: the same inode


REWRITES: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "shortened": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n{}"),
    "other content": other_content,
}


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("how", REWRITES)
def test_a_file_that_is_rewritten_in_place_is_told(tmp_path: Path, suffix: str, how: str) -> None:
    """A spooled or held file doesn't need its source any more and gives the same rows."""
    path = tmp_path / f"d.{suffix}"
    table = opened(path)
    REWRITES[how](path)
    os.utime(path, ns=(1, 1))  # whatever the clock's resolution
    if suffix in ("parquet", "json"):
        assert table.read(1999) == ROWS[1999]
        return
    for row in (0, 1999):
        with pytest.raises(UserError, match=r"d\.\w+ was rewritten while this run reads it \("):
            table.read(row)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_is_touched_or_replaced_is_read_on(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"d.{suffix}"
    table = opened(path)
    os.utime(path, ns=(5, 5))
    assert table.read(7) == ROWS[7]
    (tmp_path / "new").write_bytes(b"other")
    os.replace(tmp_path / "new", path)
    assert table.read(1999) == ROWS[1999] and table.read(0) == ROWS[0]
