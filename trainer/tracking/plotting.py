"""What all pictures share: figures that need no display, axes with whole numbers."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.base import atomic


def new_figure(width: float, height: float, dpi: int) -> Any:
    """A figure of ``width`` x ``height`` inches for files only.

    It goes past pyplot, which has global state and looks for a display; so any thread may draw it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write ``figure`` as PNG. Viewers see the old or the new picture, never a part of one."""
    data = io.BytesIO()
    figure.savefig(data, format="png")
    atomic.write_bytes(path, data.getvalue(), durable=False)  # it can be drawn again


def label_axes(axes: Any, title: str, x: str, y: str) -> None:
    """Title, axis labels with units, and a light grid."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)


def set_step_axis(axes: Any, steps: Sequence[int]) -> None:
    """A step axis without fractions of a step, also for a single one."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if steps and min(steps) == max(steps):
        axes.set_xlim(steps[0] - 1, steps[0] + 1)


def set_count_axis(axis: Any) -> None:
    """Whole numbers with thousands separators."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axis.set_major_formatter(format_count)


def format_count(value: float, position: object = None) -> str:
    """A whole number with thousands separators; a matplotlib formatter."""
    return f"{value:,.0f}"


DrawFigure = Callable[[Any], None]
"""Draws into a figure."""
