"""Pictures of dynamic batching (A11): each title says what it shows, each axis has its unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import UserError
from trainer.batching import Calibration, CostModel, Plan

RANK_COLOURS = 10
"""Ranks drawn as lines or colours of their own; more are drawn as a band."""
OCTAVES = 3
"""Lengths that span more doublings than this are drawn on a logarithmic axis."""
ABOVE = 1.6
"""Measured times beyond this multiple of the largest prediction are stalls: marked at the edge of
the picture.
"""


class DynamicBatchVisualizer:
    """Collects plans step by step and draws them every ``plot_interval`` steps into ``save_dir``.

    Draws ``tokens_per_micro_batch``, ``lengths``, ``rank_load``, ``efficiency`` and, once the cost
    model is calibrated, ``cost_curve``, each as ``<name>_step<step>.png``. Files are only written
    by the rank that owns the object.
    """

    def __init__(self, save_dir: str = "./dynamic_batch_plots", plot_interval: int = 500) -> None:
        if plot_interval < 1:
            raise UserError(
                f"DynamicBatchVisualizer: plot_interval={plot_interval}: write 1 or more steps"
            )
        self._dir, self._interval = Path(save_dir), plot_interval
        self._tokens: list[list[int]] = []
        self._budgets: list[int] = []
        self._lengths: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._steps: list[int] = []
        self._loads: list[list[float]] = []
        self._efficiency: list[float] = []
        self._bound: list[float] = []
        self._drawn = False

    def update(
        self,
        step: int,
        plan: Plan,
        *,
        boundaries: Sequence[int] | None = None,
        calibration: Calibration | None = None,
        samples: np.ndarray[Any, np.dtype[np.float64]] | None = None,
    ) -> list[Path]:
        """One plan; a step may have several. Returns the pictures written, none between intervals.

        ``boundaries``: bucket edges to mark. ``calibration`` and ``samples`` (float64
        [micro-batches, 3]: tokens, squares, seconds; :meth:`trainer.batching.Calibrator.samples`):
        the measured cost.
        """
        if self._drawn and step != self._steps[-1]:
            self._tokens, self._lengths, self._steps, self._loads = [], [], [], []
            self._efficiency, self._bound = [], []
        self._drawn = False
        while len(self._tokens) < len(plan.tokens):
            self._tokens.append([])
        for mine, new in zip(self._tokens, plan.tokens, strict=True):
            mine += [t for t in new if t > 0]
        self._budgets = [int(b) for b in plan.budgets]
        self._lengths.append(plan.cargo.lengths)
        self._steps.append(step)
        self._loads.append([float(sum(t)) for t in plan.tokens])
        self._efficiency.append(plan.efficiency)
        self._bound.append(plan.efficiency * (1.0 + plan.gap))
        if step % self._interval:
            return []
        return self.draw(step, boundaries=boundaries, calibration=calibration, samples=samples)

    def draw(
        self,
        step: int,
        *,
        boundaries: Sequence[int] | None = None,
        calibration: Calibration | None = None,
        samples: np.ndarray[Any, np.dtype[np.float64]] | None = None,
    ) -> list[Path]:
        """Draw everything since the last drawing; the next step starts a new window."""
        if not self._steps or self._drawn:
            return []
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        longest = max(int(lengths.max(initial=1)) for lengths in self._lengths)
        pictures: dict[str, Callable[[Any], None]] = {
            "tokens_per_micro_batch": lambda fig: draw_tokens(
                fig.add_subplot(), self._tokens, self._budgets
            ),
            "lengths": lambda fig: draw_lengths(
                fig.add_subplot(), np.concatenate(self._lengths), boundaries
            ),
            "rank_load": lambda fig: draw_loads(
                fig.add_subplot(), self._steps, np.array(self._loads)
            ),
            "efficiency": lambda fig: draw_efficiency(
                fig.add_subplot(), self._steps, self._efficiency, self._bound
            ),
        }
        if calibration is not None and samples is not None and len(samples):
            pictures["cost_curve"] = lambda fig: draw_cost(
                fig.subplots(1, 2), calibration, samples, longest
            )
        self._drawn = True
        return [
            _picture(self._dir / f"{name}_step{step}.png", paint)
            for name, paint in pictures.items()
        ]


def _picture(path: Path, paint: Callable[[Any], None]) -> Path:
    """One figure through the file-only backend, so that no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.8), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    paint(figure)
    figure.savefig(path)
    return path


def _plain(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    ax.set_axisbelow(True)


def _steps(ax: Any, steps: Sequence[int]) -> None:
    """A step axis without fractions of a step, also for a single one."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if min(steps) == max(steps):
        ax.set_xlim(steps[0] - 1, steps[0] + 1)


def _counts(axis: Any) -> None:
    """Whole numbers with thousands separators."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axis.set_major_formatter(lambda v, _: f"{v:,.0f}")


def draw_tokens(ax: Any, tokens: Sequence[Sequence[int]], budgets: Sequence[int]) -> None:
    """Histogram of tokens per micro-batch, one colour a rank, with the budget line."""
    over = sum(t > b for mine, b in zip(tokens, budgets, strict=True) for t in mine)
    held = sum(map(sum, tokens))
    room = sum(len(mine) * b for mine, b in zip(tokens, budgets, strict=True))
    top = max(max(budgets), max((t for mine in tokens for t in mine), default=0))
    edges = np.linspace(0, top * 1.04, 53)
    if len(tokens) <= RANK_COLOURS:
        ax.hist(
            [list(t) for t in tokens],
            bins=edges,
            stacked=True,
            label=[f"rank {r}" for r in range(len(tokens))],
        )
    else:
        ax.hist(
            np.concatenate([np.asarray(t) for t in tokens]),
            bins=edges,
            label=f"{len(tokens)} ranks together",
        )
    several = sorted(set(budgets))
    for budget, style in zip(several, ["-", "--", "-.", ":"] * len(several), strict=False):
        whose = [str(r) for r, b in enumerate(budgets) if b == budget]
        few = (
            f" of rank {', '.join(whose)}"
            if len(whose) <= RANK_COLOURS
            else f" of {len(whose)} ranks"
        )
        label = f"budget {budget:,}" + (few if len(several) > 1 else "")
        ax.axvline(budget, color="crimson", linewidth=2, linestyle=style, label=label)
    ax.set_xlim(0, top * 1.04)
    _counts(ax.xaxis)
    _counts(ax.yaxis)
    ax.legend(
        frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=6
    )  # on no bar or line
    fill = held / room if room else 0.0
    verdict = "none is over the budget" if not over else f"{over:,} ARE OVER THE BUDGET"
    _plain(
        ax,
        f"Micro-batches are {fill:.0%} full; {verdict}",
        "tokens in a micro-batch",
        "micro-batches",
    )


def draw_lengths(
    ax: Any, lengths: np.ndarray[Any, np.dtype[np.int64]], boundaries: Sequence[int] | None
) -> None:
    """How often each length occurs, with bucket edges."""
    values, counts = np.unique(lengths, return_counts=True)
    ax.scatter(
        values, counts, s=14, alpha=0.55, linewidths=0, label="a length" if boundaries else None
    )
    for i, edge in enumerate(boundaries or []):
        ax.axvline(
            edge,
            color="darkorange",
            linestyle="--",
            linewidth=1.2,
            label="bucket edge" if i == 0 else None,
        )
    if boundaries:
        ax.legend(frameon=False, fontsize=8)
    wide = values[-1] > 2**OCTAVES * values[0]
    if wide:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    else:
        _counts(ax.xaxis)
    _counts(ax.yaxis)
    ax.set_ylim(0, counts.max() * 1.1)
    half, tail = np.percentile(lengths, [50, 99])
    title = f"Half of the sequences are below {half:,.0f} tokens, 1 % above {tail:,.0f} (longest {lengths.max():,})"
    _plain(
        ax,
        title,
        f"length of a sequence, tokens{' (log scale)' if wide else ''}",
        "sequences of that length",
    )


def draw_loads(ax: Any, steps: Sequence[int], loads: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Tokens of each rank per step; with many ranks the band from the lightest to the heaviest."""
    mean = loads.mean(1)
    spread = float((loads.max(1) / np.maximum(mean, 1e-9)).mean() - 1.0)
    ranks = loads.shape[1]
    if ranks <= RANK_COLOURS:
        for rank in range(
            ranks
        ):  # each thinner than the one before: equal lines stay visible below each other
            width = 1.0 + 0.7 * (ranks - 1 - rank)
            ax.plot(
                steps,
                loads[:, rank],
                linewidth=width,
                marker=".",
                markersize=width + 3,
                label=f"rank {rank}",
            )
    else:
        ax.fill_between(
            steps,
            loads.min(1),
            loads.max(1),
            alpha=0.3,
            label=f"lightest to heaviest of {ranks} ranks",
        )
        ax.plot(steps, mean, linewidth=1.2, marker=".", markersize=4, label="mean")
    ax.legend(frameon=False, fontsize=8, ncols=5, loc="upper left")
    ax.set_ylim(0, loads.max() * 1.3)
    _counts(ax.yaxis)
    _steps(ax, steps)
    _plain(
        ax,
        f"The fullest rank holds {spread:.1%} more tokens than the mean",
        "step",
        "tokens of a rank per step",
    )


def draw_efficiency(
    ax: Any, steps: Sequence[int], efficiency: Sequence[float], bound: Sequence[float]
) -> None:
    """Predicted efficiency of each step against the best any plan could reach."""
    best = np.minimum(bound, 1.0)
    ax.fill_between(
        steps,
        efficiency,
        best,
        color="darkorange",
        alpha=0.35,
        label="gap: what a better plan could win",
    )
    ax.plot(
        steps,
        best,
        color="grey",
        linewidth=1,
        linestyle="--",
        label="proven upper bound of any plan",
    )
    ax.plot(steps, efficiency, linewidth=1.5, marker=".", markersize=4, label="this plan")
    ax.legend(frameon=False, fontsize=8, loc="lower left", ncols=3)
    span = max(0.02, 1.0 - min(efficiency))
    ax.set_ylim(max(0.0, 1.0 - 1.3 * span), 1.0 + 0.05 * span)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.1%}" if span < 0.2 else f"{v:.0%}")
    _steps(ax, steps)
    mean = float(np.mean(efficiency))
    title = f"Ranks compute {mean:.2%} of the time; they wait {1 - mean:.2%} for the slowest (predicted)"
    _plain(ax, title, "step", "computing share of the ranks' time")


def draw_cost(
    axes: Any,
    calibration: Calibration,
    samples: np.ndarray[Any, np.dtype[np.float64]],
    longest: int,
) -> None:
    """Measured micro-batch times against the calibrated model; what that model says of one sequence
    by its length.
    """
    left, right = axes
    cost: CostModel = calibration.cost
    fit = (cost.linear * samples[:, 0] + cost.quadratic * samples[:, 1] + cost.overhead) * 1e3
    took = samples[:, 2] * 1e3
    top = float(fit.max()) * 1.08
    stalls = took > ABOVE * top
    left.scatter(fit[~stalls], took[~stalls], s=14, alpha=0.5, linewidths=0, label="micro-batch")
    left.plot([0, top], [0, top], color="crimson", linewidth=1.5, label="prediction = measurement")
    if stalls.any():
        edge = np.full(int(stalls.sum()), ABOVE * top)
        label = f"{edge.size:,} slower than shown (to {took.max():,.0f} ms)"
        left.scatter(
            fit[stalls],
            edge,
            s=22,
            marker="^",
            color="grey",
            clip_on=False,
            linewidths=0,
            label=label,
        )
    left.set_xlim(0, top)
    left.set_ylim(0, ABOVE * top)
    left.legend(frameon=False, fontsize=8, loc="lower right")
    title = f"Cost model off by {calibration.error:.1%} (median)"
    _plain(left, title, "predicted time of a micro-batch, ms", "measured time, ms")

    _curve(right, cost, longest)


def _curve(ax: Any, cost: CostModel, longest: int) -> None:
    """The predicted time of one sequence by its length."""
    length = np.linspace(0, longest, 200)
    linear, square = cost.linear * length * 1e3, cost.quadratic * length**2 * 1e3
    most = float((linear + square)[-1])
    if most > 0:
        names = ["grows with the length", "attention: grows with its square"]
        ax.stackplot(length, linear, square, labels=names, alpha=0.6)
        ax.set_ylim(0, most * 1.25)
    if 0 < cost.ratio <= longest:
        ax.axvline(
            cost.ratio,
            color="black",
            linestyle=":",
            linewidth=1.2,
            label=f"equal at {cost.ratio:,.0f} tokens",
        )
    ax.set_xlim(0, longest)
    _counts(ax.xaxis)
    if most > 0:
        ax.legend(frameon=False, fontsize=8, loc="upper left")
        title = f"Attention: {float(square[-1]) / most:.0%} of the longest's cost"
    else:
        ax.set_yticks([])
    if not cost.quadratic:
        title = "Attention is not seen yet" if most else "All overhead: no length is seen to matter"
    _plain(ax, title, "length of a sequence, tokens", "predicted time of one sequence, ms")
