"""The table of ``python -m jobs status``."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jobs.ledger import Entry
from jobs.submit.report import plain, varying_overrides
from jobs.view.logs import tail_of
from jobs.view.state import RunState

REWARD = ("critic/score/mean", "val/reward", "train/loss")
SPEED = ("perf/throughput", "perf/tokens_per_second")
ETTR = ("goodput/ettr",)
TAIL_BYTES = 16384
TITLES = ("run", "overrides", "state", "job", "att", "step", "reward", "tok/s", "ettr", "reason")
NUMBERS = ("att", "step", "reward", "tok/s", "ettr")
COLOUR = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "FAILED": "red",
    "LOST": "red",
    "EXHAUSTED": "red",
}


def console_of() -> Console:
    """The terminal; a pipe or a file gets lines of 200 characters, so that nothing depends on a
    window.
    """
    return Console(width=None if sys.stdout.isatty() else 200)


def table_of(entries: Sequence[Entry], states: Mapping[str, RunState]) -> Table:
    """One row per run: name, overrides, state, job, attempt, step, reward, speed, goodput, reason;
    no empty columns.
    """
    varying = varying_of(entries)
    rows: list[list[str]] = []
    for entry in entries:
        state, seen = states[entry.run], last_metrics(Path(entry.run))
        rows.append(
            [
                entry.name,
                " ".join(varying[entry.run]),
                state.state,
                entry.job,
                str(state.attempt or ""),
                str(seen.get("step", "")),
                _number(seen, REWARD),
                _number(seen, SPEED),
                _number(seen, ETTR),
                _reason(entry, state),
            ]
        )
    table = Table(box=None, pad_edge=False)
    shown = [n for n in range(len(TITLES)) if n == 0 or any(row[n] for row in rows)]
    for number in shown:
        title = TITLES[number]
        if title in ("overrides", "reason"):  # what gives way on a narrow terminal
            table.add_column(
                title,
                overflow="ellipsis" if title == "overrides" else "fold",
                no_wrap=title == "overrides",
            )
        else:
            table.add_column(
                title, justify="right" if title in NUMBERS else "left", no_wrap=True, min_width=3
            )
    for row in rows:
        cells = [
            Text(row[n], style=COLOUR.get(row[n], "") if TITLES[n] == "state" else "")
            for n in shown
        ]
        table.add_row(*cells)
    return table


def _reason(entry: Entry, state: RunState) -> str:
    """Why; of a run that failed the last line it said."""
    if state.state == "FAILED" and (words := tail_of(Path(entry.run), 1).strip()):
        return words
    return state.reason


def varying_of(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """By run: the overrides that not all runs of its sweep share, keys cut to their last name."""
    by_sweep: dict[str, dict[str, Sequence[str]]] = {}
    for entry in entries:
        by_sweep.setdefault(entry.sweep, {})[entry.run] = entry.overrides
    found = [varying_overrides(members) for members in by_sweep.values()]
    return {
        run: [_short(one) for one in mine] for members in found for run, mine in members.items()
    }


def _short(override: str) -> str:
    key, sign, value = plain(override).partition("=")
    return key.rpartition(".")[2] + sign + value


def last_metrics(run: Path) -> dict[str, Any]:
    """The last values of ``metrics.jsonl`` (newest wins); only its tail is read."""
    merged: dict[str, Any] = {}
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return merged
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            merged.update(value)
    return merged


def _number(row: Mapping[str, Any], names: Sequence[str]) -> str:
    for name in names:
        if isinstance(row.get(name), int | float):
            return f"{row[name]:.4g}"
    return ""
