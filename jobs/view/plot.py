"""``python -m jobs compare --plot FILE``: the curves of the rows as one PNG."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs.view.comparison import Row
from jobs.view.curves import STEP, TIME, TOKENS, Curves
from trainer.base import atomic
from trainer.base.errors import UserError

MOST_ROWS = 12
"""Curves of a panel; the first rows in the order of the table are drawn."""
MOST_POINTS = 600
"""Of a curve: more than a panel has dots. Each point is the mean of its share of the steps."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#999999")
"""Okabe and Ito's, which colour-blind people tell apart."""
DASHES = ("-", "--", ":")
LABELS = {STEP: "step", TOKENS: "tokens", TIME: "seconds of steps"}
COLUMNS = 2

Line = tuple[list[float], list[float], list[float]]
"""Places on the axis, means and sample standard deviations over the seeds."""


def plot(
    path: Path,
    rows: Sequence[Row],
    metrics: Sequence[str],
    curves: Mapping[str, Curves],
    axis: str,
) -> None:
    """Write one panel for each metric that has a curve; seeds of a row are a line with a band.

    ``curves``: by the name of a run. Raises UserError without matplotlib, without a curve, and for
    a file that can't be written.
    """
    figure_class = _figure_class()
    shown = rows[:MOST_ROWS]
    panels: dict[str, list[Line | None]] = {}
    for metric in metrics:
        lines = [line_of(row, metric, curves, axis) for row in shown]
        if any(lines):
            panels[metric] = lines
    if not panels:
        raise UserError("--plot: none of these runs has a point to draw; choose with --metric.")
    height = -(-len(panels) // COLUMNS)
    width = min(COLUMNS, len(panels))
    figure = figure_class(figsize=(6.4 * width, 3.4 * height + 0.3 * len(shown)), dpi=110)
    figure.set_layout_engine("constrained")
    for number, (metric, lines) in enumerate(panels.items(), start=1):
        _draw(figure.add_subplot(height, width, number), metric, lines, axis)
    handles, _ = figure.axes[0].get_legend_handles_labels()
    titles = [title_of(row) for row in shown]
    figure.legend(handles, titles, loc="outside lower left", fontsize=8, frameon=False)
    data = io.BytesIO()
    figure.savefig(data, format="png")
    try:
        atomic.write_bytes(path, data.getvalue(), durable=False)
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror or error}).") from error


def line_of(row: Row, metric: str, curves: Mapping[str, Curves], axis: str) -> Line | None:
    """The mean over the row's runs at each step that they share, thinned; None without a point."""
    runs = [curves[name] for name in row.runs if metric in curves[name].points]
    if not runs:
        return None
    values = [dict(run.points[metric]) for run in runs]
    steps = sorted(set.intersection(*(set(one) for one in values)))
    points = []
    for step in steps:
        here = [one[step] for one in values]
        if not all(math.isfinite(value) for value in here):
            continue
        place = statistics.fmean(run.reached[axis][step] for run in runs)
        spread = statistics.stdev(here) if len(here) > 1 else 0.0
        points.append((place, statistics.fmean(here), spread))
    if not points:
        return None
    bins = min(MOST_POINTS, len(points))
    shares = [points[i * len(points) // bins : (i + 1) * len(points) // bins] for i in range(bins)]
    means = [[statistics.fmean(part) for part in zip(*share, strict=True)] for share in shares]
    places, middle, spreads = (list(column) for column in zip(*means, strict=True))
    return places, middle, spreads


def title_of(row: Row) -> str:
    """The settings that differ, else the run's name; with its marks."""
    settings = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in row.settings.items())
    text = settings or row.name
    if len(row.runs) > 1:
        text += f" ({len(row.runs)} seeds)"
    return f"{text}  [{', '.join(row.marks)}]" if row.marks else text


def _draw(axes: Any, metric: str, lines: Sequence[Line | None], axis: str) -> None:
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        dash = DASHES[number // len(COLOURS) % len(DASHES)]
        places, middle, spreads = line or ([], [], [])
        few = len(places) < 2
        axes.plot(places, middle, dash, color=colour, lw=1.4, marker="o" if few else "", label="_")
        axes.lines[-1].set_label(str(number))
        if any(spreads):
            low = [mean - spread for mean, spread in zip(middle, spreads, strict=True)]
            high = [mean + spread for mean, spread in zip(middle, spreads, strict=True)]
            axes.fill_between(places, low, high, color=colour, alpha=0.15, lw=0)
    axes.set_title(metric, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(LABELS[axis])
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("--plot draws with matplotlib: type pip install matplotlib.") from error
    return Figure
