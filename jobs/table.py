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

from jobs.ledger import Entry
from jobs.state import RunState

REWARD = ("critic/rewards/mean", "reward/mean", "critic/score/mean", "val/reward/mean", "train/loss")
SPEED = ("perf/throughput", "perf/tokens_per_second", "perf/tokens_per_s")
TAIL_BYTES = 16384
COLOUR = {
    "COMPLETED": "green",
    "RUNNING": "cyan",
    "PENDING": "yellow",
    "FAILED": "red",
    "LOST": "red",
    "EXHAUSTED": "red",
}


def console_of() -> Console:
    """The terminal; a pipe or a file gets lines of 200 characters, so that nothing depends on a window."""
    return Console(width=None if sys.stdout.isatty() else 200)


def table_of(entries: Sequence[Entry], states: Mapping[str, RunState]) -> Table:
    """One row per run: name, overrides, state, attempt, step, reward, tokens/s, reason."""
    table = Table(box=None, pad_edge=False)
    for title in ("run", "overrides", "state", "job", "att", "step", "reward", "tok/s", "reason"):
        table.add_column(
            title, justify="right" if title in ("att", "step", "reward", "tok/s") else "left", overflow="fold"
        )
    varying = varying_overrides(entries)
    for entry in entries:
        state = states[entry.run]
        shown = f"[{COLOUR.get(state.state, 'white')}]{state.state}[/]"
        row = last_metrics(Path(entry.run))
        table.add_row(
            entry.name, " ".join(varying[entry.run]), shown, entry.job,
            str(state.attempt), str(row.get("step", "")), _number(row, REWARD), _number(row, SPEED), state.reason,
        )  # fmt: skip
    return table


def varying_overrides(entries: Sequence[Entry]) -> dict[str, list[str]]:
    """By run: the overrides that not all runs of its sweep share, keys cut to their last name."""
    by_sweep: dict[str, list[Entry]] = {}
    for entry in entries:
        by_sweep.setdefault(entry.sweep, []).append(entry)
    found: dict[str, list[str]] = {}
    for members in by_sweep.values():
        shared = set.intersection(*(set(member.overrides) for member in members)) if len(members) > 1 else set()
        for member in members:
            found[member.run] = [_short(one) for one in member.overrides if one not in shared]
    return found


def _short(override: str) -> str:
    key, sign, value = override.partition("=")
    return ".".join(key.split(".")[-1:]) + sign + value


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
