"""``python -m benchmarks.planner_picture RESULTS.json PICTURE.png``: what the planner's benchmark
found, drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
    found = {
        (r["trace"], r["budget"], r["algorithm"]): r
        for r in rows
        if (r["sequences"], r["ranks"]) == (256, 8)
    }
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ours: list[float] = []
    others: list[float] = []
    for at, (trace, budget, _) in enumerate(SETTINGS):
        for i, (algorithm, _, colour) in enumerate(PLANNERS):
            row = found[trace, budget, algorithm]
            idle = 100.0 * (1.0 - row["7B micro"])
            (ours if i == 0 else others).append(idle)
            broken = row["over cap %"] > 0
            x = at + (i - (len(PLANNERS) - 1) / 2) * 0.125
            axes.bar(
                x,
                idle,
                0.112,
                color=colour,
                hatch="////" if broken else None,
                edgecolor=RED if broken else colour,
            )
            weight, tint = ("bold", BLUE) if i == 0 else ("normal", "#444444")
            axes.annotate(
                f"{idle:.2f}" if idle < 1 else f"{idle:.1f}",
                (x, idle),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=tint,
                weight=weight,
            )
    axes.set_xticks(range(len(SETTINGS)), [label for *_, label in SETTINGS])
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("time that ranks wait, % (planned)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.set_title(
        f"Ranks wait {min(ours):.2f} to {max(ours):.1f} % of the time with our plans, which always "
        "hold the token cap, "
        f"and {min(others):.1f} to {max(others):.0f} % with others'",
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
    handles = [Patch(color=colour, label=label) for _, label, colour in PLANNERS]
    handles.append(
        Patch(facecolor="white", edgecolor=RED, hatch="////", label="breaks the token cap")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text())["rows"], Path(sys.argv[2]))
