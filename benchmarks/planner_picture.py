"""``python -m benchmarks.planner_picture RESULTS.json PICTURE.png``: draw the results of the
planner's benchmark.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

SETTINGS = (
    ("gsm8k_train", "longest", "GSM8K\nbudget = longest"),
    ("search_r1_qwen2.5_7b", 8192, "search-R1\nbudget 8k"),
    ("search_r1_qwen2.5_7b", 16384, "search-R1\nbudget 16k"),
    ("intern_s1_math", "longest", "Intern-S1 math\nbudget = longest"),
)
BLUE, RED = "#1f5fa8", "#c0392b"
PLANNERS = (
    ("Plimsoll", "Plimsoll", BLUE),
    ("KK + FFD/KK capped (used by none)", "best mixture (used by none)", "#6b6b6b"),
    ("slime: first-fit + KK", "slime", "#8a8a8a"),
    ("NeMo-RL: MFFD dealt out", "NeMo-RL", "#a8a8a8"),
    ("verl PR 7553: KK + KK, +1 until it fits", "verl (PR 7553)", "#bdbdbd"),
    ("OpenRLHF: KK + first-fit count + KK", "OpenRLHF", "#d0d0d0"),
    ("verl <= 0.8: KK + KK", "verl \N{LESS-THAN OR EQUAL TO} 0.8", "#e2e2e2"),
)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bars of the time that ranks wait for each other: 256 sequences, 8 ranks, sync=micro, 7B
    cost.
    """
    by_case = {
        (r["trace"], r["budget"], r["algorithm"]): r
        for r in rows
        if (r["sequences"], r["ranks"]) == (256, 8)
    }
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    idle: dict[str, list[float]] = {algorithm: [] for algorithm, _, _ in PLANNERS}
    for at, (trace, budget, _) in enumerate(SETTINGS):
        for i, (algorithm, _, colour) in enumerate(PLANNERS):
            row = by_case[trace, budget, algorithm]
            percent = 100.0 * (1.0 - row["7B micro"])
            idle[algorithm].append(percent)
            x = at + (i - (len(PLANNERS) - 1) / 2) * 0.125
            _draw_bar(axes, x, percent, colour, over_cap=row["over cap %"] > 0, ours=i == 0)
    axes.set_xticks(range(len(SETTINGS)), [label for *_, label in SETTINGS])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("time that ranks wait, % (planned)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    ours, *others = idle.values()
    _add_titles(axes, ours, [percent for percents in others for percent in percents])
    _add_legend(figure)
    figure.savefig(path)


def _draw_bar(
    axes: Axes, x: float, percent: float, colour: str, *, over_cap: bool, ours: bool
) -> None:
    """One bar with its figure above; hatched where the plan breaks the token cap."""
    axes.bar(
        x,
        percent,
        0.112,
        color=colour,
        hatch="////" if over_cap else None,
        edgecolor=RED if over_cap else colour,
    )
    axes.annotate(
        f"{percent:.2f}" if percent < 1 else f"{percent:.1f}",
        (x, percent),
        (0, 2),
        textcoords="offset points",
        ha="center",
        fontsize=8,
        color=BLUE if ours else "#444444",
        weight="bold" if ours else "normal",
    )


def _add_titles(axes: Axes, ours: list[float], others: list[float]) -> None:
    axes.set_title(
        f"Ranks wait {min(ours):.2f} to {max(ours):.1f} % of the time with our plans, which always "
        f"hold the token cap, and {min(others):.1f} to {max(others):.0f} % with others'",
        loc="left",
        fontsize=11.5,
        fontweight="bold",
        pad=24,
    )
    axes.text(
        0,
        1.02,
        "256 sequences of real lengths, 8 ranks that wait for each other after every micro-batch, "
        "7B model",
        transform=axes.transAxes,
        fontsize=9,
        color="#444444",
    )


def _add_legend(figure: Figure) -> None:
    handles = [Patch(color=colour, label=label) for _, label, colour in PLANNERS]
    handles.append(
        Patch(facecolor="white", edgecolor=RED, hatch="////", label="breaks the token cap")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))
