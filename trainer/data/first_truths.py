"""The right answers of the first rows of each data source, read without a tokenizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

from trainer.base.data_files import expand
from trainer.base.data_tables import Table, open_table
from trainer.base.errors import UserError
from trainer.config.schema import Config
from trainer.data.build import keys_of
from trainer.data.dataset import source_named_after
from trainer.data.fields import lookup, read_row

PER_SOURCE = 4
"""Rows of each source whose answers are taken."""
PER_FILE = 2000
"""First rows of a file that are read to find sources, and as many spread over the others."""
LIMIT_S = 10.0
"""Seconds after which no more rows are read."""


@dataclass(frozen=True, kw_only=True)
class SourceTruth:
    """The right answer of a row."""

    key: str
    """``data.train_files`` or ``data.val_files``."""
    location: str
    """File and row."""
    data_source: str
    named: bool
    """The row itself names its source; else it is called after the file."""
    ground_truth: Any


def first_truths(
    config: Config, *, clock: Callable[[], float] = monotonic
) -> Iterator[SourceTruth]:
    """The answers of the first ``PER_SOURCE`` rows of each data source, training before validation.

    A row that can't be read is passed over: ``check_samples`` names it. Raises UserError for files
    that are missing or damaged.
    """
    deadline = clock() + LIMIT_S
    counts: dict[tuple[str, str], int] = {}
    for key, table, i in _rows(config):
        truth = _truth(config, table, i, key)
        if truth is not None:
            counted = (key, truth.data_source)
            counts[counted] = counts.get(counted, 0) + 1
            if counts[counted] <= PER_SOURCE:
                yield truth
        if clock() >= deadline:
            return


def _rows(config: Config) -> Iterator[tuple[str, Table, int]]:
    """Key, table and index of the rows to read; training data only in RL, where they are judged."""
    data = config.data
    training = data.train_files if config.trainer.mode == "rl" else None
    for key, patterns, limit in (
        ("data.train_files", training, data.train_max_samples),
        ("data.val_files", data.val_files, data.val_max_samples),
    ):
        left = sys.maxsize if limit is None else limit
        for path in expand(patterns, key) if patterns else []:
            table = open_table(path)
            yield from ((key, table, i) for i in _indices(min(len(table), left)))
            left = max(0, left - len(table))


def _indices(rows: int) -> Iterator[int]:
    """The first rows, and some of the others at equal distances."""
    yield from range(min(rows, PER_FILE))
    others = rows - PER_FILE
    if others > 0:
        yield from range(PER_FILE, rows, -(-others // PER_FILE))


def _truth(config: Config, table: Table, i: int, key: str) -> SourceTruth | None:
    """The answer of a row; None for a row without one, or one that can't be read."""
    location = f"{table.path}, row {table.number(i)}"
    keys = keys_of(config)
    try:
        fields = table.read(i)
        row = read_row(fields, keys, location, source_named_after(table.path))
    except UserError:
        return None
    if row.ground_truth is None:
        return None
    try:
        named = lookup(fields, keys.data_source) is not None
    except KeyError:
        named = False
    return SourceTruth(
        key=key,
        location=location,
        data_source=row.data_source,
        named=named,
        ground_truth=row.ground_truth,
    )
