"""Pictures of a run from its ``metrics.jsonl``: reward (or loss) over steps, tokens per micro-batch
against the budget.

``python -m trainer.tracking.pictures RUN`` draws them again at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import EXIT_OK, EXIT_USER, UserError
from trainer.base.metrics_file import METRICS_FILE, by_step

TRAIN_REWARD = ("critic/score/mean",)
VAL_REWARD = ("val/reward",)
TRAIN_LOSS = ("train/nll", "actor/loss")
MICRO_BATCH = "batch/micro_batch_tokens"
BUDGET = "batch/budget"
BLUE, GREEN, RED, GREY = "#1f5fa8", "#2a8a4a", "#c0392b", "#8a8f98"
Steps = Mapping[int, Mapping[str, Any]]
Points = tuple[list[int], list[float]]


def draw_pictures(run_dir: Path) -> list[Path]:
    """Draw what the record has data for into ``<run>/plots``; returns the files. Raises UserError
    without a record.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise UserError(
            f"{path} doesn't exist: give the folder of a run that has logged at least one step."
        )
    steps = by_step(path)
    folder = run_dir / "plots"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = [
        _figure(
            folder / "reward.png",
            lambda axes: _curve(axes, steps, TRAIN_REWARD, VAL_REWARD, "reward"),
        ),
        _figure(folder / "loss.png", lambda axes: _curve(axes, steps, TRAIN_LOSS, (), "loss")),
        _figure(folder / "tokens_per_micro_batch.png", lambda axes: _stowage(axes, steps)),
    ]
    return [p for p in made if p is not None]


def series(steps: Steps, names: Sequence[str]) -> Points:
    """Steps and finite values of the first of ``names`` that the run has."""
    for name in names:
        found = [
            (s, float(m[name])) for s, m in steps.items() if isinstance(m.get(name), (int, float))
        ]
        found = [(s, v) for s, v in found if abs(v) != float("inf") and v == v]
        if found:
            return [s for s, _ in found], [v for _, v in found]
    return [], []


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average with the bias of its start taken out (Adam, section 3)."""
    out, average, scale = [], 0.0, 0.0
    for value in values:
        average = weight * average + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        out.append(average / scale)
    return out


def _figure(path: Path, draw: Callable[[Any], bool]) -> Path | None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import (
        Figure,
    )  # no pyplot: no global state, no display, safe in any thread
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if not draw(axes):
        path.unlink(missing_ok=True)
        return None
    axes.set_xlabel("step")
    left, right = axes.dataLim.intervalx
    if left == right:  # a single step: no fractions of a step on the axis
        axes.set_xlim(left - 1, right + 1)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary)
    temporary.replace(path)
    return path


def _curve(axes: Any, steps: Steps, train: Sequence[str], val: Sequence[str], what: str) -> bool:
    (x, y), (vx, vy) = series(steps, train), series(steps, val)
    if x:
        few = len(x) < 10
        axes.plot(
            x,
            y,
            color=BLUE,
            alpha=1 if few else 0.3,
            lw=1.2,
            marker="." if few else None,
            label=f"train {what}",
        )
        if not few:
            axes.plot(x, smooth(y), color=BLUE, lw=2, label=f"train {what}, smoothed")
    if vx:
        axes.plot(
            vx, vy, color=GREEN, lw=1.5, ls="--", marker="o", ms=7, label=f"validation {what}"
        )
        for i in {0, len(vx) - 1}:
            axes.annotate(
                f"{vy[i]:.3g}",
                (vx[i], vy[i]),
                (0, 9),
                textcoords="offset points",
                ha="center",
                color=GREEN,
                weight="bold",
            )
    if not x and not vx:
        return False
    change = f": validation {vy[0]:.3g} → {vy[-1]:.3g}" if len(vx) > 1 else ""
    if train == TRAIN_LOSS and len(x) > 1 and series(steps, TRAIN_LOSS[:1])[0]:
        # of the likelihood; a policy's loss has no level worth a title
        change = f": {y[0]:.3g} → {smooth(y)[-1]:.3g}"
    axes.set_title(f"{what.capitalize()} over steps{change}", loc="left")
    axes.set_ylabel(what)
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    return True


def _stowage(axes: Any, steps: Steps) -> bool:
    (x, mean), (_, low), (_, high) = (
        series(steps, [f"{MICRO_BATCH}/{k}"]) for k in ("mean", "min", "max")
    )
    bx, budget = series(steps, [BUDGET])
    if not x:
        return False
    if len(low) == len(high) == len(x):
        axes.fill_between(
            x, low, high, color=BLUE, alpha=0.18, lw=0, label="smallest to largest micro-batch"
        )
        if len(x) == 1:
            axes.vlines(x, low, high, color=BLUE, alpha=0.4, lw=8)
    axes.plot(x, mean, color=BLUE, lw=2, marker="." if len(x) < 30 else None, label="mean")
    title = "Tokens per micro-batch"
    if budget:
        label = f"budget ({budget[-1]:,.0f})"
        if len(set(budget)) == 1:
            axes.axhline(budget[0], color=RED, lw=1.8, ls="--", label=label)
        else:
            axes.plot(bx, budget, color=RED, lw=1.8, ls="--", drawstyle="steps-post", label=label)
        at = dict(zip(bx, budget, strict=True))
        fill = [m / at[s] for s, m in zip(x, mean, strict=True) if at.get(s)]
        title += f": {sum(fill) / len(fill):.0%} of the budget on average" if fill else ""
    axes.set_title(title, loc="left")
    axes.set_ylabel("real tokens of a micro-batch")
    axes.set_ylim(0, 1.18 * max([*mean, *high, *budget]))
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    axes.legend(frameon=False, loc="lower right")
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m trainer.tracking.pictures RUN``."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1:
        sys.stderr.write("Use: python -m trainer.tracking.pictures RUN_FOLDER\n")
        return EXIT_USER
    try:
        files = draw_pictures(Path(arguments[0]))
    except UserError as error:
        sys.stderr.write(f"Error: {error}\n")
        return EXIT_USER
    sys.stdout.write(
        "".join(f"{p}\n" for p in files)
        or "Nothing to draw yet: no reward, loss or micro-batch is logged.\n"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
