"""Data sets: numbered samples that become tokens when they are read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import xxhash

from trainer.base.data_tables import Table, open_table
from trainer.base.errors import UserError
from trainer.base.forked import ordered_map
from trainer.data.encode import Encoder
from trainer.data.example import Example
from trainer.data.fields import DataRow, Keys, read_row


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Identity of a data set's content. It doesn't depend on where the files lie."""

    name: str
    """For messages: file names and number of samples."""
    digest: str


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of a data set when a run began."""

    key: str
    """``data.train_files`` or ``data.val_files``."""
    path: str
    size: int
    """Bytes."""
    mtime_ns: int
    """When it was last written, nanoseconds since 1970."""
    digest: str


class Dataset(Protocol):
    """Samples 0 .. len-1. ``ds[i]`` is the same in every process."""

    fingerprint: Fingerprint

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Example:
        """Sample ``index``. Raises UserError when it can't be trained on."""
        ...


class FileDataset:
    """Rows of several files, one after another.

    ``key`` (such as ``data.train_files``) stands in messages. ``limit`` keeps only the first rows.
    ``filter_prompts`` leaves out rows with a prompt longer than ``max_prompt_length``, which
    tokenizes every prompt once, in ``num_workers`` processes. The first row of each file is read
    and checked at once.

    Raises UserError for files without rows, a bad first row, and when no prompt is short enough.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        keys: Keys,
        encoder: Encoder,
        *,
        key: str = "data.train_files",
        limit: int | None = None,
        filter_prompts: bool = False,
        num_workers: int = 0,
    ) -> None:
        self._tables: list[Table] = [open_table(p) for p in paths]
        self._key = key
        self._keys = keys
        self._encoder = encoder
        self._ends = list(accumulate(len(t) for t in self._tables))
        self._rows: Sequence[int] = range(
            self._ends[-1] if limit is None else min(limit, self._ends[-1])
        )
        names = ", ".join(p.name for p in paths)
        if not self._rows:
            raise UserError(f"{key}: {names} has no rows")
        for start in [0, *self._ends[:-1]]:
            if start < len(self._rows):
                self._read(*self._locate(start))
        if filter_prompts:
            total = len(self._rows)
            self._rows = [
                i for i, fits in zip(self._rows, self._fitting(num_workers), strict=True) if fits
            ]
            if not self._rows:
                raise UserError(
                    f"{key}: all {total} prompts of {names} are longer than "
                    "data.max_prompt_length; raise it or set data.filter_overlong_prompts=False"
                )
        content = xxhash.xxh3_128()
        names_of_fields = asdict(keys)
        for who_judges in ("maths_rule", "rules"):  # not what the samples are
            del names_of_fields[who_judges]
        fields = repr(sorted(names_of_fields.items()))
        digests = [table.source.digest() for table in self._tables]
        for part in (*digests, fields, str(len(self._rows))):
            content.update(part.encode() + b"\0")
        self.fingerprint = Fingerprint(
            name=f"{names} ({len(self._rows)} samples)", digest=content.hexdigest()
        )

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        table, i = self._locate(self._rows[index])
        return self._encoder.encode(
            self._read(table, i), index=index, file=str(table.path), row=table.number(i)
        )

    def files(self) -> list[DataFile]:
        """The files as they were opened, in order."""
        return [
            DataFile(
                key=self._key,
                path=str(table.path.absolute()),
                size=table.source.size,
                mtime_ns=table.source.mtime_ns,
                digest=table.source.digest(),
            )
            for table in self._tables
        ]

    def _locate(self, position: int) -> tuple[Table, int]:
        """The table of the row at ``position`` of all files, and the row's index in it."""
        file = bisect_right(self._ends, position)
        start = self._ends[file - 1] if file else 0
        return self._tables[file], position - start

    def _read(self, table: Table, i: int) -> DataRow:
        name = source_named_after(table.path)
        return read_row(table.read(i), self._keys, _location(table, i), name)

    def _fitting(self, num_workers: int) -> Iterator[bool]:
        """For each row, whether its prompt fits."""
        size = 256
        spans = [(k, min(k + size, len(self._rows))) for k in range(0, len(self._rows), size)]

        def measure(span: tuple[int, int]) -> list[bool]:
            fits = []
            for position in self._rows[slice(*span)]:
                table, i = self._locate(position)
                row = self._read(table, i)
                fits.append(self._encoder.prompt_fits(row, _location(table, i)))
            return fits

        for part in ordered_map(
            measure, spans, num_workers=min(num_workers, len(spans)), name="prompt filter"
        ):
            yield from part


def source_named_after(path: Path) -> str:
    """The data source of rows that name none: the file, or of ``.arrow`` files the folder that
    ``datasets`` gave a name.
    """
    return path.parent.name if path.suffix == ".arrow" else path.stem


def _location(table: Table, i: int) -> str:
    """File and row, for messages."""
    return f"{table.path}, row {table.number(i)}"


def same_data_warning(train: Dataset, val: Dataset) -> str | None:
    """A warning when training and validation are the very same samples, else None."""
    if train.fingerprint == val.fingerprint:
        return (
            f"validation uses the training samples ({train.fingerprint.name}); val/* says nothing "
            "about new prompts"
        )
    return None


def describe(dataset: Dataset) -> dict[str, Any]:
    """The fingerprint as plain data for a checkpoint."""
    return asdict(dataset.fingerprint)
