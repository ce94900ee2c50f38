"""Metrics of several runs side by side, from their ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from jobs.ledger import Entry
from jobs.view.columns import GAP, LEAST_FLEXIBLE, LEAST_NAME, cut
from jobs.view.table import varying_of
from trainer.base.errors import UserError, nearest
from trainer.base.metrics_file import METRICS_FILE, last_step, read_metrics

DEFAULT_METRICS = (
    "critic/score/mean",
    "val/reward",
    "actor/pg_loss",
    "train/loss",
    "perf/throughput",
    "timing/step",
)
"""Shown unless others are asked for, as far as the runs have them."""
VALUE_WIDTH = 12
"""Characters of a metric's column."""


def metrics_at(run: Path, step: int | None) -> dict[str, float]:
    """Numbers of a run at ``step``, of a repeated step the newest ones.

    None: the newest number of each metric.
    """
    merged: dict[str, float] = {}
    for record in read_metrics(run / METRICS_FILE):
        if step is None or record["step"] == step:
            merged |= {
                key: value for key, value in record.items() if isinstance(value, int | float)
            }
    return merged


def last_common_step(runs: Sequence[Path]) -> int | None:
    """The newest step that every run has; None when there is none."""
    steps = [{record["step"] for record in read_metrics(run / METRICS_FILE)} for run in runs]
    common = set.intersection(*steps) if steps else set()
    return max(common, default=None)


def compare_tables(
    entries: Sequence[Entry], metrics: Sequence[str] | None, at: int | None, width: int
) -> list[Table]:
    """One row per run, one column per metric; as many tables as fit beside each other in ``width``
    characters.

    Raises UserError for a metric, or a step, that no run has.
    """
    runs = [Path(entry.run) for entry in entries]
    step = at if at is not None else last_common_step(runs)
    rows = [metrics_at(run, step) for run in runs]
    if at is not None and entries and not any(rows):
        last_steps = [last_step(run / METRICS_FILE) for run in runs]
        newest = [step for step in last_steps if step is not None]
        hint = f"the newest one is {max(newest)}" if newest else "they have none yet"
        raise UserError(f"no run has step {at}: {hint}; leave --at out for the last common one.")
    known = sorted(set().union(*rows)) if rows else []
    for name in metrics or ():
        if name not in known:
            where = "" if step is None else f" at step {step}"
            hint = nearest(name, known) or f"; there are {', '.join(known[:12]) or 'none yet'}."
            raise UserError(f"no run has the metric '{name}'{where}{hint}")
    names = list(metrics or [name for name in DEFAULT_METRICS if name in known] or known[:6])
    title = f"step {step}" if step is not None else "newest values"
    return [
        _table(entries, rows, group, title, width)
        for group in _groups(names, width - _name_width(entries, width))
    ]


def _name_width(entries: Sequence[Entry], width: int) -> int:
    longest = max((len(entry.name) for entry in entries), default=0)
    return min(longest, max(LEAST_NAME, width // 2))


def _groups(names: Sequence[str], room: int) -> list[list[str]]:
    """The metrics of each table; every value is shown whole."""
    count = max(1, room // (VALUE_WIDTH + GAP))
    return [list(names[first : first + count]) for first in range(0, max(1, len(names)), count)]


def _table(
    entries: Sequence[Entry],
    rows: Sequence[Mapping[str, float]],
    names: Sequence[str],
    title: str,
    width: int,
) -> Table:
    """A table of ``names``. Their titles may take several lines, their values never do."""
    name_width = _name_width(entries, width)
    room = width - name_width - len(names) * (VALUE_WIDTH + GAP) - GAP
    varying = {run: " ".join(words) for run, words in varying_of(entries).items()}
    room = min(room, max([len("overrides"), *map(len, varying.values())]))
    with_overrides = room >= LEAST_FLEXIBLE and any(varying.values())
    table = Table(title=title, box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, width=name_width)
    if with_overrides:
        table.add_column("overrides", no_wrap=True, width=room)
    for name in names:
        table.add_column(name, overflow="fold", justify="right", width=VALUE_WIDTH)
    for entry, row in zip(entries, rows, strict=True):
        cells = [cut(entry.name, name_width, in_front=True)]
        if with_overrides:
            cells.append(cut(varying[entry.run], room))
        cells += [f"{row[name]:.6g}" if name in row else "" for name in names]
        table.add_row(*map(Text, cells))
    return table
