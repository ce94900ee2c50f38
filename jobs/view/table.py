"""The table of ``python -m jobs status``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.ledger import Entry
from jobs.rank_logs import tail_of
from jobs.run_state import RunState
from jobs.submit.report import short, varying_overrides
from jobs.view.columns import cut, fitted_widths
from trainer.base.metrics_file import METRICS_FILE, last_values

REWARD = ("critic/score/mean", "val/reward", "train/loss")
SPEED = ("perf/throughput", "perf/tokens_per_second")
ETTR = ("goodput/ettr",)
TITLES = ("run", "overrides", "state", "job", "att", "step", "reward", "tok/s", "ettr", "reason")
NUMBERS = ("att", "step", "reward", "tok/s", "ettr")
ALWAYS = ("state", "step", "reward", "tok/s")
"""Columns that are never cut, however narrow the terminal."""
EXTRA = ("att", "ettr", "job")
"""Columns that are left out where there is no room, the last one first."""
FLEXIBLE = ("reason", "overrides")
"""Columns that give way, down to a few characters."""
COLOUR = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "FAILED": "red",
    "LOST": "red",
    "EXHAUSTED": "red",
}


def console_of() -> Console:
    """The terminal. A pipe or a file gets lines of 200 characters unless COLUMNS says otherwise."""
    follows = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if follows else 200)


def table_of(entries: Sequence[Entry], states: Mapping[str, RunState], width: int) -> Table:
    """One row per run with the columns of ``TITLES`` that are not empty and fit into ``width``."""
    varying = varying_of(entries)
    rows = [_row(entry, states[entry.run], varying[entry.run]) for entry in entries]
    needed = {
        title: max([len(title), *(len(row[n]) for row in rows)])
        for n, title in enumerate(TITLES)
        if n == 0 or any(row[n] for row in rows)
    }
    widths = fitted_widths(needed, width, name="run", always=ALWAYS, extra=EXTRA, flexible=FLEXIBLE)
    table = Table(box=None, pad_edge=False)
    for title, size in widths.items():
        _add_column(table, title, size)
    for row in rows:
        cells = dict(zip(TITLES, row, strict=True))
        table.add_row(*(_cell(title, cells[title], size) for title, size in widths.items()))
    return table


def _row(entry: Entry, state: RunState, overrides: Sequence[str]) -> list[str]:
    metrics = last_values(Path(entry.run) / METRICS_FILE)
    return [
        entry.name,
        " ".join(overrides),
        state.state,
        entry.job,
        str(state.attempt or ""),
        str(metrics.get("step", "")),
        _first_number(metrics, REWARD),
        _first_number(metrics, SPEED),
        _first_number(metrics, ETTR),
        _reason(entry, state),
    ]


def _add_column(table: Table, title: str, width: int) -> None:
    justify: Literal["left", "right"] = "right" if title in NUMBERS else "left"
    table.add_column(title, justify=justify, no_wrap=True, width=width)


def _cell(title: str, text: str, width: int) -> Text:
    shown = cut(text, width, in_front=title == "run")
    return Text(shown, style=COLOUR.get(text, "") if title == "state" else "")


def _reason(entry: Entry, state: RunState) -> str:
    """The state's reason; the last line of the log for a run that failed."""
    if state.state == "FAILED":
        last_line = tail_of(Path(entry.run), 1).strip()
        if last_line:
            return last_line
    return state.reason


def varying_of(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """The overrides of each run that not all runs of its sweep share, keys cut to their last
    name.
    """
    by_sweep: dict[str, dict[str, Sequence[str]]] = {}
    for entry in entries:
        by_sweep.setdefault(entry.sweep, {})[entry.run] = entry.overrides
    varying: dict[str, list[str]] = {}
    for members in by_sweep.values():
        for run, overrides in varying_overrides(members).items():
            varying[run] = [short(override) for override in overrides]
    return varying


def _first_number(metrics: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of the metrics ``names`` that is a number, NaN included, as text."""
    for name in names:
        if isinstance(metrics.get(name), int | float):
            return f"{metrics[name]:.4g}"
    return ""
