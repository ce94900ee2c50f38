"""Pictures of a run from its ``metrics.jsonl``: reward or loss over steps, and the tokens per
micro-batch against the budget.

``python -m trainer.tracking.pictures RUN`` draws them again at any time.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base import caches
from trainer.base.command import run_command
from trainer.base.errors import EXIT_OK, EXIT_USER, UserError
from trainer.base.metrics_file import METRICS_FILE, by_step
from trainer.tracking.plotting import format_count, new_figure, save_figure, set_step_axis

TRAIN_REWARD = ("critic/score/mean",)
VAL_REWARD = ("val/reward",)
TRAIN_LOSS = ("train/nll", "actor/loss")
MICRO_BATCH = "batch/micro_batch_tokens"
BUDGET = "batch/budget"
BLUE = "#1f5fa8"
GREEN = "#2a8a4a"
RED = "#c0392b"
MAX_MARKED_POINTS = 10
"""Shorter curves are drawn as marked points; longer ones are smoothed."""

Steps = Mapping[int, Mapping[str, Any]]
"""All metrics of each step."""
Points = tuple[list[int], list[float]]
"""Steps, and the value at each of them."""


def draw_pictures(run_dir: Path) -> list[Path]:
    """Draw the pictures that the record has data for into ``<run>/plots``; return the files.

    Raises UserError without a record.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise UserError(
            f"{path} doesn't exist: give the folder of a run that has logged at least one step."
        )
    steps = by_step(path)
    folder = run_dir / "plots"
    folder.mkdir(mode=0o700, exist_ok=True)
    pictures: dict[str, Callable[[Any, Steps], bool]] = {
        "reward.png": draw_rewards,
        "loss.png": draw_losses,
        "tokens_per_micro_batch.png": draw_micro_batches,
    }
    return [
        folder / name for name, draw in pictures.items() if _draw_file(folder / name, draw, steps)
    ]


def draw_rewards(axes: Any, steps: Steps) -> bool:
    """Draw training and validation reward; False without data."""
    train = series(steps, TRAIN_REWARD)
    validation = series(steps, VAL_REWARD)
    change = ""
    if len(validation[1]) > 1:
        change = f": validation {validation[1][0]:.3g} → {validation[1][-1]:.3g}"
    return _draw_curves(axes, "reward", train, validation, change)


def draw_losses(axes: Any, steps: Steps) -> bool:
    """Draw the training loss; False without data."""
    train = series(steps, TRAIN_LOSS)
    change = ""
    # Only for the likelihood: the level of a policy's loss means nothing.
    if len(train[1]) > 1 and series(steps, TRAIN_LOSS[:1])[0]:
        change = f": {train[1][0]:.3g} → {smooth(train[1])[-1]:.3g}"
    return _draw_curves(axes, "loss", train, ([], []), change)


def draw_micro_batches(axes: Any, steps: Steps) -> bool:
    """Draw tokens per micro-batch against the budget; False without data."""
    x, mean = series(steps, [f"{MICRO_BATCH}/mean"])
    _, smallest = series(steps, [f"{MICRO_BATCH}/min"])
    _, largest = series(steps, [f"{MICRO_BATCH}/max"])
    budget = series(steps, [BUDGET])
    if not x:
        return False
    if len(smallest) == len(largest) == len(x) and smallest != largest:
        label = "smallest to largest micro-batch"
        axes.fill_between(x, smallest, largest, color=BLUE, alpha=0.18, lw=0, label=label)
        if len(x) == 1:
            axes.vlines(x, smallest, largest, color=BLUE, alpha=0.4, lw=8)
    axes.plot(x, mean, color=BLUE, lw=2, marker="." if len(x) < 30 else None, label="mean")
    _draw_budget(axes, budget)
    axes.set_title(f"Tokens per micro-batch{_fill_text((x, mean), budget)}", loc="left")
    axes.set_ylabel("real tokens of a micro-batch")
    axes.set_ylim(0, 1.18 * max([*mean, *largest, *budget[1]]))
    axes.yaxis.set_major_formatter(format_count)
    axes.legend(frameon=False, loc="lower right")
    return True


def series(steps: Steps, names: Sequence[str]) -> Points:
    """Steps and finite values of the first of ``names`` that the run has."""
    for name in names:
        xs: list[int] = []
        ys: list[float] = []
        for step, metrics in steps.items():
            value = metrics.get(name)
            if isinstance(value, (int, float)) and math.isfinite(value):
                xs.append(step)
                ys.append(float(value))
        if xs:
            return xs, ys
    return [], []


def smooth(values: Sequence[float], weight: float = 0.8) -> list[float]:
    """Exponential moving average without the bias of its start (Adam, arXiv:1412.6980, section 3).

    ``values`` [steps]; returns [steps].
    """
    averages = []
    average = 0.0
    scale = 0.0
    for value in values:
        average = weight * average + (1 - weight) * value
        scale = weight * scale + (1 - weight)
        averages.append(average / scale)
    return averages


def _draw_file(path: Path, draw: Callable[[Any, Steps], bool], steps: Steps) -> bool:
    """Draw one picture; without data remove an old one. Returns whether there is a picture."""
    figure = new_figure(8, 4.5, dpi=120)
    axes = figure.add_subplot()
    if not draw(axes, steps):
        path.unlink(missing_ok=True)
        return False
    axes.set_xlabel("step")
    left, right = axes.dataLim.intervalx
    set_step_axis(axes, [left, right])
    axes.grid(True, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)
    return True


def _draw_curves(axes: Any, name: str, train: Points, validation: Points, change: str) -> bool:
    """Draw a metric of training and validation; ``change`` ends the title. False without data."""
    x, y = train
    if len(x) >= MAX_MARKED_POINTS:
        axes.plot(x, y, color=BLUE, alpha=0.3, lw=1.2, label=f"train {name}")
        axes.plot(x, smooth(y), color=BLUE, lw=2, label=f"train {name}, smoothed")
    elif x:
        axes.plot(x, y, color=BLUE, lw=1.2, marker=".", label=f"train {name}")
    if validation[0]:
        _draw_validation(axes, validation, name)
    if not x and not validation[0]:
        return False
    axes.set_title(f"{name.capitalize()} over steps{change}", loc="left")
    axes.set_ylabel(name)
    axes.margins(y=0.15)
    axes.legend(frameon=False)
    return True


def _draw_validation(axes: Any, points: Points, name: str) -> None:
    """A dashed line with the first and the last value beside it."""
    x, y = points
    style = {"color": GREEN, "lw": 1.5, "ls": "--", "marker": "o", "ms": 7}
    axes.plot(x, y, label=f"validation {name}", **style)
    for index in {0, len(x) - 1}:
        axes.annotate(
            f"{y[index]:.3g}",
            (x[index], y[index]),
            (0, 9),
            textcoords="offset points",
            ha="center",
            color=GREEN,
            weight="bold",
        )


def _draw_budget(axes: Any, budget: Points) -> None:
    x, y = budget
    if not y:
        return
    label = f"budget ({y[-1]:,.0f})"
    if len(set(y)) == 1:
        axes.axhline(y[0], color=RED, lw=1.8, ls="--", label=label)
    else:
        axes.plot(x, y, color=RED, lw=1.8, ls="--", drawstyle="steps-post", label=label)


def _fill_text(mean: Points, budget: Points) -> str:
    """The title's end: the mean fill of the micro-batches."""
    budgets = dict(zip(*budget, strict=True))
    shares = [
        tokens / budgets[step] for step, tokens in zip(*mean, strict=True) if budgets.get(step)
    ]
    return f": {sum(shares) / len(shares):.0%} of the budget on average" if shares else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_command(lambda: _run(sys.argv[1:] if arguments is None else arguments))


def _run(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        sys.stderr.write("Use: python -m trainer.tracking.pictures RUN_FOLDER\n")
        return EXIT_USER
    caches.prepare(Path(arguments[0]))
    files = draw_pictures(Path(arguments[0]))
    sys.stdout.write(
        "".join(f"{path}\n" for path in files)
        or "Nothing to draw yet: no reward, loss or micro-batch is logged.\n"
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
