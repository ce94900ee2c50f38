"""Pictures of dynamic batching (A11): each title says what it shows, each axis has its unit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.batching import Calibration, CostModel, Plan
from trainer.errors import UserError

RANK_COLOURS = 10
"""Ranks drawn as lines or colours of their own; more are drawn as a band."""


class DynamicBatchVisualizer:
    """Collects plans step by step and draws them every ``plot_interval`` steps into ``save_dir``.

    Draws ``tokens_per_micro_batch``, ``lengths``, ``rank_load``, ``efficiency`` and, once the cost model is calibrated,
    ``cost_curve``, each as ``<name>_step<step>.png``. Files are only written by the rank that owns the object.
    """

    def __init__(self, save_dir: str = "./dynamic_batch_plots", plot_interval: int = 500) -> None:
        if plot_interval < 1:
            raise UserError(f"DynamicBatchVisualizer: plot_interval={plot_interval}: write 1 or more steps")
        self._dir, self._interval = Path(save_dir), plot_interval
        self._tokens: list[list[int]] = []
        self._budgets: list[int] = []
        self._lengths: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        self._steps: list[int] = []
        self._loads: list[list[float]] = []
        self._efficiency: list[float] = []
        self._bound: list[float] = []

    def update(
        self,
        step: int,
        plan: Plan,
        *,
        boundaries: Sequence[int] | None = None,
        calibration: Calibration | None = None,
        samples: np.ndarray[Any, np.dtype[np.float64]] | None = None,
    ) -> list[Path]:
        """One step's plan. Returns the pictures written, none between intervals.

        ``boundaries``: bucket edges to mark. ``calibration`` and ``samples`` (float64 [micro-batches, 3]: tokens,
        squares, seconds; :meth:`trainer.batching.Calibrator.samples`): the measured cost.
        """
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
        """Draw everything since the last drawing and start a new window."""
        if not self._steps:
            return []
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        pictures = {
            "tokens_per_micro_batch": lambda ax: draw_tokens(ax, self._tokens, self._budgets),
            "lengths": lambda ax: draw_lengths(ax, np.concatenate(self._lengths), boundaries),
            "rank_load": lambda ax: draw_loads(ax, self._steps, np.array(self._loads)),
            "efficiency": lambda ax: draw_efficiency(ax, self._steps, self._efficiency, self._bound),
        }
        if calibration is not None and samples is not None and len(samples):
            pictures["cost_curve"] = lambda ax: draw_cost(ax, calibration, samples)
        written = [_picture(self._dir / f"{name}_step{step}.png", paint) for name, paint in pictures.items()]
        self._tokens, self._lengths, self._steps, self._loads = [], [], [], []
        self._efficiency, self._bound = [], []
        return written


def _picture(path: Path, paint: Any) -> Path:
    """One figure through the file-only backend, so that no display is needed."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    paint(figure.add_subplot())
    figure.savefig(path)
    return path


def _plain(ax: Any, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontsize=11, fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis="y", alpha=0.25)
    ax.set_axisbelow(True)
    if x == "step":
        ax.xaxis.get_major_locator().set_params(integer=True)


def draw_tokens(ax: Any, tokens: Sequence[Sequence[int]], budgets: Sequence[int]) -> None:
    """Histogram of tokens per micro-batch, one colour a rank, with the budget line."""
    over = sum(t > b for mine, b in zip(tokens, budgets, strict=True) for t in mine)
    held = sum(map(sum, tokens))
    room = sum(len(mine) * b for mine, b in zip(tokens, budgets, strict=True))
    edges = np.linspace(0, max(budgets) * 1.04, 53)
    if len(tokens) <= RANK_COLOURS:
        ax.hist([list(t) for t in tokens], bins=edges, stacked=True, label=[f"rank {r}" for r in range(len(tokens))])
    else:
        ax.hist(np.concatenate([np.asarray(t) for t in tokens]), bins=edges, label=f"{len(tokens)} ranks together")
    for budget in sorted(set(budgets)):
        ax.axvline(budget, color="crimson", linewidth=2, label=f"budget {budget:,}")
    ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=2 if len(tokens) > 4 else 1)
    fill = held / room if room else 0.0
    verdict = "none is over the budget" if not over else f"{over} ARE OVER THE BUDGET"
    _plain(ax, f"Micro-batches are {fill:.0%} full; {verdict}", "tokens in a micro-batch", "micro-batches")


def draw_lengths(ax: Any, lengths: np.ndarray[Any, np.dtype[np.int64]], boundaries: Sequence[int] | None) -> None:
    """How often each length occurs, with bucket edges."""
    values, counts = np.unique(lengths, return_counts=True)
    ax.scatter(values, counts, s=12, alpha=0.55, linewidths=0)
    for i, edge in enumerate(boundaries or []):
        ax.axvline(edge, color="darkorange", linestyle="--", linewidth=1, label="bucket edge" if i == 0 else None)
    if boundaries:
        ax.legend(frameon=False, fontsize=8)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    ax.set_ylim(bottom=0)
    half, tail = np.percentile(lengths, [50, 99])
    title = f"Half of the sequences are below {half:,.0f} tokens, 1 % above {tail:,.0f} (longest {lengths.max():,})"
    _plain(ax, title, "length of a sequence, tokens (log scale)", "sequences of that length")


def draw_loads(ax: Any, steps: Sequence[int], loads: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Tokens of each rank per step; with many ranks the band from the lightest to the heaviest."""
    mean = loads.mean(1)
    spread = float((loads.max(1) / np.maximum(mean, 1e-9)).mean() - 1.0)
    if loads.shape[1] <= RANK_COLOURS:
        for rank in range(loads.shape[1]):
            ax.plot(steps, loads[:, rank], linewidth=1.2, marker=".", markersize=3, label=f"rank {rank}")
    else:
        ax.fill_between(steps, loads.min(1), loads.max(1), alpha=0.3, label=f"lightest to heaviest of {loads.shape[1]}")
        ax.plot(steps, mean, linewidth=1.2, label="mean")
    ax.legend(frameon=False, fontsize=8, ncols=4)
    ax.set_ylim(0, loads.max() * 1.25)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    _plain(ax, f"The fullest rank holds {spread:.1%} more tokens than the mean", "step", "tokens of a rank per step")


def draw_efficiency(ax: Any, steps: Sequence[int], efficiency: Sequence[float], bound: Sequence[float]) -> None:
    """Predicted efficiency of each step against the best any plan could reach."""
    best = np.minimum(bound, 1.0)
    ax.fill_between(steps, efficiency, best, color="darkorange", alpha=0.35, label="gap to the bound")
    ax.plot(steps, best, color="grey", linewidth=1, linestyle="--", label="proven upper bound of any plan")
    ax.plot(steps, efficiency, linewidth=1.5, marker=".", markersize=4, label="this plan")
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    ax.set_ylim(max(0.0, min(efficiency) - 0.05), 1.005)
    ax.yaxis.set_major_formatter(lambda v, _: f"{v:.1%}")
    mean = float(np.mean(efficiency))
    title = f"Ranks compute {mean:.2%} of the time; they wait {1 - mean:.2%} for the slowest (predicted)"
    _plain(ax, title, "step", "computing share of the ranks' time")


def draw_cost(ax: Any, calibration: Calibration, samples: np.ndarray[Any, np.dtype[np.float64]]) -> None:
    """Measured micro-batch times against the calibrated model."""
    cost: CostModel = calibration.cost
    fit = cost.linear * samples[:, 0] + cost.quadratic * samples[:, 1] + cost.overhead
    ax.scatter(fit * 1e3, samples[:, 2] * 1e3, s=14, alpha=0.5, linewidths=0, label="micro-batch")
    top = float(max(fit.max(), np.percentile(samples[:, 2], 98))) * 1.05e3
    ax.plot([0, top], [0, top], color="crimson", linewidth=1.5, label="prediction = measurement")
    ax.set_xlim(0, top)
    ax.set_ylim(0, top * 1.1)
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    half = f"attention is half of the cost at {cost.ratio:,.0f} tokens" if cost.quadratic else "attention is not seen"
    title = f"Cost model off by {calibration.error:.1%} (median); {half}"
    _plain(ax, title, "predicted time of a micro-batch, ms", "measured time, ms")
