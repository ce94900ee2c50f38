"""``python -m jobs compare``: runs side by side, from their ``metrics.jsonl``."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from jobs.ledger import Entry
from jobs.view.columns import GAP, LEAST_FLEXIBLE, LEAST_NAME, cut
from jobs.view.comparison import Row, Value, in_order, make_rows, marked
from jobs.view.curves import AXES, Curves, common_end, read_curves
from jobs.view.settings import differing
from trainer.base import atomic
from trainer.base.errors import UserError, nearest
from trainer.base.json_files import read_object
from trainer.base.run_folder import WANDB_IDENTITY

COLUMNS = (
    ("critic/score/mean", "val/reward"),
    ("actor/pg_loss", "train/loss"),
    ("perf/throughput",),
    ("timing/step",),
    ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb"),
    ("batch/fill_ratio",),
    ("goodput/ettr",),
)
"""Shown unless others are asked for: of each group the first that a run has."""
DEFAULT_METRICS = tuple(name for group in COLUMNS for name in group)
LEAST_VALUE = 12
"""Least characters of a metric's column, so that its title takes few lines."""
LEAST_SETTINGS = 16
"""Characters that metrics leave for the settings that differ."""
ENDS = ("common", "end")


@dataclass(frozen=True)
class Comparison:
    """What all forms of output show."""

    rows: Sequence[Row]
    metrics: Sequence[str]
    title: str
    judged_by: str
    """The metric by which the best row is marked; empty without one."""
    curves: Mapping[str, Curves]
    """Name of a run -> its curves."""


def compare(entries: Sequence[Entry], options: Namespace) -> Comparison:
    """Compare runs as the command line asks.

    Raises UserError for a metric or a step that no run has, and for options that make no sense.
    """
    how = _checked_how(options.value)
    wanted = tuple(options.metric or DEFAULT_METRICS)
    sort_key = [options.sort] if options.sort else []
    matches = _matcher((*wanted, *DEFAULT_METRICS, *sort_key))
    curves = [read_curves(Path(entry.run), matches) for entry in entries]
    known = sorted(set().union(*(one.names for one in curves)))
    metrics = _chosen(options.metric, known)
    at = _end_of(options.at, options.axis, curves)
    settings = differing(entries)
    judged = options.sort if options.sort in known else next(iter(metrics), "")
    rows = make_rows(
        [entry.name for entry in entries],
        settings,
        curves,
        list(dict.fromkeys([*metrics, *_standard(known), *([judged] if judged else [])])),
        axis=options.axis,
        at=at,
        how=how,
        by_seed=not options.each_run,
    )
    rows = marked(rows, judged)
    if options.sort:
        keys = list(dict.fromkeys(key for row in rows for key in row.settings))
        rows = in_order(rows, _sort_key(options.sort, known, keys))
    by_name = {entry.name: one for entry, one in zip(entries, curves, strict=True)}
    return Comparison(rows, metrics, _title(options.axis, at, how), judged, by_name)


def tables(comparison: Comparison, width: int) -> list[Table]:
    """One row per setting, one column per metric; as many tables as fit beside each other in
    ``width`` characters.
    """
    names = {metric: _column_width(comparison.rows, metric) for metric in comparison.metrics}
    room = width - _name_width(comparison.rows, width) - _mark_width(comparison.rows) - GAP
    room -= min(LEAST_SETTINGS, _settings_width(comparison.rows)) + GAP
    groups: list[list[str]] = [[]]
    used = 0
    for metric, size in names.items():
        if groups[-1] and used + size + GAP > room:
            groups.append([])
            used = 0
        groups[-1].append(metric)
        used += size + GAP
    return [_table(comparison, group, width) for group in groups]


def csv_text(comparison: Comparison) -> str:
    """One line per row with its settings, the mean, standard deviation and count of each metric."""
    keys = list(dict.fromkeys(key for row in comparison.rows for key in row.settings))
    head = ["run", "runs", "marks", "last_step", *keys]
    for metric in comparison.metrics:
        head += [metric, f"{metric} std", f"{metric} n"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for row in comparison.rows:
        steps = "" if row.steps is None else row.steps
        cells: list[Any] = [row.name, " ".join(row.runs), " ".join(row.marks), steps]
        cells += [row.settings.get(key, "") for key in keys]
        for metric in comparison.metrics:
            cells += _csv_cells(row.values.get(metric))
        writer.writerow(cells)
    return out.getvalue()


def json_text(comparison: Comparison) -> str:
    """The rows as strict JSON; NaN and infinities are texts."""
    rows = [
        {
            "run": row.name,
            "runs": list(row.runs),
            "settings": dict(row.settings),
            "marks": list(row.marks),
            "last_step": row.steps,
            "metrics": {
                metric: _plain(row.values[metric])
                for metric in comparison.metrics
                if metric in row.values
            },
        }
        for row in comparison.rows
    ]
    whole = {"at": comparison.title, "judged_by": comparison.judged_by, "rows": rows}
    return json.dumps(whole, allow_nan=False, indent=1) + "\n"


def write(path: Path, text: str) -> None:
    """Write an output, ``-`` to stdout. Raises UserError when that is not possible."""
    if str(path) == "-":
        sys.stdout.write(text)
        return
    try:
        atomic.write_text(path, text, durable=False)
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror or error}).") from error


def shared_ids(entries: Iterable[Entry]) -> list[str]:
    """One sentence for each W&B id that several of the runs have, as a copied folder does."""
    owners: dict[str, list[str]] = {}
    for entry in entries:
        found = read_object(Path(entry.run) / WANDB_IDENTITY).get("id")
        if isinstance(found, str):
            owners.setdefault(found, []).append(entry.name)
    return [
        f"{' and '.join(names)} have one W&B id, {found}: one folder is a copy of the other.\n"
        for found, names in owners.items()
        if len(names) > 1
    ]


def _checked_how(how: str) -> str:
    if how in ("last", "best") or re.fullmatch(r"mean-[1-9]\d{0,8}", how):
        return how
    raise UserError(f"--value {how}: give last, best, or mean-K for the mean of the last K values.")


def _matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    answers: dict[str, bool] = {}

    def matches(name: str) -> bool:
        if name not in answers:
            answers[name] = any(fnmatchcase(name, pattern) for pattern in patterns)
        return answers[name]

    return matches


def _chosen(patterns: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The metrics to show. Raises UserError for a pattern that no metric of any run fits."""
    if not patterns:
        return _standard(known) or list(known[:6])
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in known if name == pattern or fnmatchcase(name, pattern)]
        if not found:
            hint = nearest(pattern, known) or f"; there are {', '.join(known[:12]) or 'none yet'}."
            raise UserError(f"no run has the metric '{pattern}'{hint}")
        chosen += found
    return list(dict.fromkeys(chosen))


def _standard(known: Sequence[str]) -> list[str]:
    return [next(n for n in group if n in known) for group in COLUMNS if set(group) & set(known)]


def _end_of(at: str, axis: str, curves: Sequence[Curves]) -> float | None:
    """Where on the axis to look. Raises UserError for a place that no run has reached."""
    if at == "end":
        return None
    if at == "common":
        return common_end(curves, axis)
    try:
        place = float(at)
    except ValueError:
        place = math.nan
    if not math.isfinite(place) or place < 0:
        raise UserError(f"--at {at}: give a number, or one of {', '.join(ENDS)}.")
    furthest = max((one.end(axis) for one in curves), default=0.0)
    if furthest < place:
        hint = f"the newest one is {furthest:.10g}" if furthest else "they have none yet"
        raise UserError(f"no run has {axis} {at}: {hint}; leave --at out for the last common one.")
    return place


def _sort_key(key: str, known: Sequence[str], settings: Sequence[str]) -> str:
    """A metric, or a setting by its whole or last name. Raises UserError for what is neither."""
    fitting = [one for one in settings if key in (one, one.rpartition(".")[2])]
    if key in known:
        return key
    if not fitting:
        names = [*known, *settings]
        hint = nearest(key, names) or ";"
        raise UserError(f"--sort {key} is no metric and no setting that differs{hint}")
    return fitting[0]


def _title(axis: str, at: float | None, how: str) -> str:
    names = dict(zip(AXES, ("step {}", "{} tokens", "{} s of steps"), strict=True))
    place = "at the end of each run" if at is None else names[axis].format(f"{at:.10g}")
    if how == "last":
        return place
    return f"{how.replace('mean-', 'mean of the last ')}, {place}"


def _csv_cells(value: Value | None) -> list[Any]:
    if value is None:
        return ["", "", 0]
    return [value.mean, "" if value.std is None else value.std, value.count]


def _plain(value: Value) -> dict[str, Any]:
    mean: float | str = value.mean
    if not math.isfinite(value.mean):
        mean = str(value.mean)
    return {
        "mean": mean,
        "std": value.std,
        "count": value.count,
        "not_finite": value.not_finite,
    }


def _column_width(rows: Sequence[Row], metric: str) -> int:
    texts = [row.values[metric].text for row in rows if metric in row.values]
    return max([LEAST_VALUE, *map(len, texts)])


def _name_width(rows: Sequence[Row], width: int) -> int:
    longest = max((len(row.name) for row in rows), default=0)
    return min(longest, max(LEAST_NAME, width // 3))


def _settings_text(row: Row) -> str:
    return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in row.settings.items())


def _settings_width(rows: Sequence[Row]) -> int:
    return max([len("overrides"), *(len(_settings_text(row)) for row in rows)])


def _mark_width(rows: Sequence[Row]) -> int:
    longest = max((len(" ".join(row.marks)) for row in rows), default=0)
    return longest + GAP if longest else 0


def _table(comparison: Comparison, metrics: Sequence[str], width: int) -> Table:
    """A table of ``metrics``. Their titles may take several lines, their values never do."""
    rows = comparison.rows
    name_width = _name_width(rows, width)
    mark_width = _mark_width(rows)
    sizes = [_column_width(rows, metric) for metric in metrics]
    room = width - name_width - mark_width - sum(size + GAP for size in sizes) - GAP
    texts = [_settings_text(row) for row in rows]
    with_overrides = any(texts) and room >= min(LEAST_FLEXIBLE, _settings_width(rows))
    room = min(room, _settings_width(rows))
    table = Table(title=comparison.title, box=None, pad_edge=False)
    table.add_column("run", no_wrap=True, width=name_width)
    if mark_width:
        table.add_column("", no_wrap=True, width=mark_width - GAP)
    if with_overrides:
        table.add_column("overrides", no_wrap=True, width=room)
    for metric, size in zip(metrics, sizes, strict=True):
        table.add_column(metric, overflow="fold", justify="right", width=size)
    for row, text in zip(rows, texts, strict=True):
        cells = [cut(row.name, name_width, in_front=True)]
        if mark_width:
            cells.append(" ".join(row.marks))
        if with_overrides:
            cells.append(cut(text, room))
        cells += [row.values[m].text if m in row.values else "" for m in metrics]
        table.add_row(*map(Text, cells))
    return table
