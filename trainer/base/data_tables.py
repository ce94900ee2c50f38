"""Random access to the rows of a data file, which stay on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from trainer.base.errors import UserError
from trainer.base.json_tables import Json, JsonLines, Row
from trainer.base.opened_file import OpenedFile


class Table(Protocol):
    """Rows of one file. Forked processes share its pages."""

    path: Path
    source: OpenedFile

    def __len__(self) -> int: ...

    def read(self, i: int) -> Row:
        """Row ``i``. Raises UserError naming file and row when it can't be read, or naming a file
        that was rewritten since it was opened.
        """
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
    """The table of a file, by its suffix.

    Raises UserError when the file is empty, damaged or holds something else.
    """
    if path.stat().st_size == 0:
        raise UserError(f"{path} is empty")
    if path.suffix in (".jsonl", ".ndjson"):
        return JsonLines(path)
    if path.suffix == ".json":
        return Json(path)
    from trainer.base.arrow_tables import open_arrow  # pyarrow, which a login node may lack

    return open_arrow(path)
