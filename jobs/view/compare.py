"""Metrics of several runs side by side, from their ``metrics.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from jobs.ledger import Entry
from jobs.view.table import varying_of
from trainer.base.errors import UserError, nearest
from trainer.base.metrics_file import METRICS_FILE, read_metrics

DEFAULT_METRICS = (
    "critic/score/mean",
    "val/reward",
    "actor/pg_loss",
    "train/loss",
    "perf/throughput",
    "timing/step",
)
"""Shown unless others are asked for, as far as the runs have them."""


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


def compare_table(entries: Sequence[Entry], metrics: Sequence[str] | None, at: int | None) -> Table:
    """One row per run, one column per metric. Raises UserError for a metric that no run has."""
    runs = [Path(entry.run) for entry in entries]
    step = at if at is not None else last_common_step(runs)
    rows = [metrics_at(run, step) for run in runs]
    known = sorted(set().union(*rows)) if rows else []
    for name in metrics or ():
        if name not in known:
            where = "" if step is None else f" at step {step}"
            hint = nearest(name, known) or f"; there are {', '.join(known[:12]) or 'none yet'}."
            raise UserError(f"no run has the metric '{name}'{where}{hint}")
    names = list(metrics or [name for name in DEFAULT_METRICS if name in known] or known[:6])
    table = Table(
        title=f"step {step}" if step is not None else "newest values", box=None, pad_edge=False
    )
    for title in ("run", "overrides", *names):
        table.add_column(title, overflow="fold", justify="right" if title in names else "left")
    varying = varying_of(entries)
    for entry, row in zip(entries, rows, strict=True):
        table.add_row(
            entry.name,
            " ".join(varying[entry.run]),
            *(f"{row[n]:.6g}" if n in row else "" for n in names),
        )
    return table
