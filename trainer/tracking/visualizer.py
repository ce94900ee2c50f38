"""Collects the plans of dynamic batching and draws them at intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import UserError
from trainer.batching import Calibration, Plan
from trainer.tracking import batch_plots
from trainer.tracking.plotting import DrawFigure, new_figure, save_figure

Lengths = np.ndarray[Any, np.dtype[np.int64]]
Samples = np.ndarray[Any, np.dtype[np.float64]]
"""float64 [micro-batches, 3]: tokens, squares, seconds; see
:meth:`trainer.batching.Calibrator.samples`.
"""


@dataclass
class PlanWindow:
    """The plans since the last pictures."""

    tokens: list[list[int]] = field(default_factory=list)
    """Tokens of every micro-batch, by rank."""
    budgets: list[int] = field(default_factory=list)
    """Budget of each rank."""
    lengths: list[Lengths] = field(default_factory=list)
    """Lengths of the sequences of each plan [sequences]."""
    steps: list[int] = field(default_factory=list)
    """Step of each plan."""
    loads: list[list[float]] = field(default_factory=list)
    """Tokens of each rank, by plan."""
    efficiency: list[float] = field(default_factory=list)
    """Predicted efficiency of each plan."""
    bound: list[float] = field(default_factory=list)
    """Proven upper bound of the efficiency, by plan."""

    def add(self, step: int, plan: Plan) -> None:
        """Add a plan of ``step``."""
        while len(self.tokens) < len(plan.tokens):
            self.tokens.append([])
        for rank_tokens, new_tokens in zip(self.tokens, plan.tokens, strict=True):
            rank_tokens += [count for count in new_tokens if count > 0]
        self.budgets = [int(budget) for budget in plan.budgets]
        self.lengths.append(plan.sequences.lengths)
        self.steps.append(step)
        self.loads.append([float(sum(rank_tokens)) for rank_tokens in plan.tokens])
        self.efficiency.append(plan.efficiency)
        self.bound.append(plan.efficiency * (1.0 + plan.gap))


class DynamicBatchVisualizer:
    """Collects plans step by step and draws them every ``plot_interval`` steps into ``save_dir``.

    Draws ``tokens_per_micro_batch``, ``lengths``, ``rank_load``, ``efficiency`` and, once the cost
    model is calibrated, ``cost_curve``, each as ``<name>_step<step>.png``. Files are only written
    by the rank that owns the object.
    """

    def __init__(self, save_dir: str = "./dynamic_batch_plots", plot_interval: int = 500) -> None:
        """Raises UserError for an interval below 1."""
        if plot_interval < 1:
            raise UserError(
                f"DynamicBatchVisualizer: plot_interval={plot_interval}: write 1 or more steps"
            )
        self._folder = Path(save_dir)
        self._interval = plot_interval
        self._window = PlanWindow()
        self._drawn = False

    def update(
        self,
        step: int,
        plan: Plan,
        *,
        boundaries: Sequence[int] | None = None,
        calibration: Calibration | None = None,
        samples: Samples | None = None,
    ) -> list[Path]:
        """Add one plan; a step may have several. Returns the pictures written, none between
        intervals.

        ``boundaries``: bucket edges to mark. ``calibration`` and ``samples`` (float64
        [micro-batches, 3]: tokens, squares, seconds): the measured cost.
        """
        if self._drawn and step != self._window.steps[-1]:
            self._window = PlanWindow()
        self._drawn = False
        self._window.add(step, plan)
        if step % self._interval:
            return []
        return self.draw(step, boundaries=boundaries, calibration=calibration, samples=samples)

    def draw(
        self,
        step: int,
        *,
        boundaries: Sequence[int] | None = None,
        calibration: Calibration | None = None,
        samples: Samples | None = None,
    ) -> list[Path]:
        """Draw everything since the last pictures; the next step starts a new window."""
        if not self._window.steps or self._drawn:
            return []
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._drawn = True
        written = []
        for name, draw in self._plots(boundaries, calibration, samples).items():
            path = self._folder / f"{name}_step{step}.png"
            figure = new_figure(9, 4.8, dpi=110)
            draw(figure)
            save_figure(figure, path)
            written.append(path)
        return written

    def _plots(
        self,
        boundaries: Sequence[int] | None,
        calibration: Calibration | None,
        samples: Samples | None,
    ) -> dict[str, DrawFigure]:
        """How to draw each picture, by its name."""
        window = self._window
        lengths = np.concatenate(window.lengths)

        def draw_tokens(figure: Any) -> None:
            batch_plots.draw_tokens(figure.add_subplot(), window.tokens, window.budgets)

        def draw_lengths(figure: Any) -> None:
            batch_plots.draw_lengths(figure.add_subplot(), lengths, boundaries)

        def draw_loads(figure: Any) -> None:
            batch_plots.draw_loads(figure.add_subplot(), window.steps, np.array(window.loads))

        def draw_efficiency(figure: Any) -> None:
            batch_plots.draw_efficiency(
                figure.add_subplot(), window.steps, window.efficiency, window.bound
            )

        plots: dict[str, DrawFigure] = {
            "tokens_per_micro_batch": draw_tokens,
            "lengths": draw_lengths,
            "rank_load": draw_loads,
            "efficiency": draw_efficiency,
        }
        if calibration is None or samples is None or not len(samples):
            return plots

        def draw_cost(figure: Any) -> None:
            longest = int(lengths.max(initial=1))
            batch_plots.draw_cost(figure.subplots(1, 2), calibration, samples, longest)

        return plots | {"cost_curve": draw_cost}
