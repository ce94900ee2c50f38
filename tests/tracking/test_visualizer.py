"""The pictures of dynamic batching: windows, titles, labels, axes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from trainer.batching import Calibration, CostModel, plan
from trainer.tracking import batch_plots
from trainer.tracking.visualizer import DynamicBatchVisualizer


def labels(axes: object) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[attr-defined]


def test_a_step_of_several_plans_is_one_picture(tmp_path: Path) -> None:
    """The second optimizer step of an iteration is drawn with what came before it, not instead of
    it.
    """
    pictures = DynamicBatchVisualizer(str(tmp_path), plot_interval=2)
    made = plan([100, 200, 300], 512, 2)
    assert pictures.update(1, made) == []
    assert len(pictures.update(2, made)) == len(pictures.update(2, made)) == 4
    assert pictures._window.steps == [1, 2, 2] and pictures.draw(2) == []
    assert pictures.update(3, made) == [] and pictures._window.steps == [3]


def test_budget_lines_name_their_ranks_and_the_title_what_is_over() -> None:
    axes = Figure().add_subplot()
    batch_plots.draw_tokens(axes, [[90, 100], [150, 210]], [100, 200])
    assert labels(axes) == ["rank 0", "rank 1", "budget 100 of rank 0", "budget 200 of rank 1"]
    assert axes.get_title(loc="left") == "Micro-batches are 92% full; 1 ARE OVER THE BUDGET"
    assert axes.get_xlim()[1] > 210
    assert axes.get_xlabel() == "tokens in a micro-batch"


def test_lengths_turn_logarithmic_where_they_span_much() -> None:
    for lengths, scale in (([100, 400], "linear"), ([100, 4000], "log")):
        axes = Figure().add_subplot()
        batch_plots.draw_lengths(axes, np.array(lengths), None)
        assert axes.get_xscale() == scale


def test_stalls_leave_the_cost_curve_readable() -> None:
    axes = Figure().subplots(1, 2)
    samples = np.array([[100.0, 1e4, 0.01], [200.0, 4e4, 0.02], [200.0, 4e4, 0.9]])
    batch_plots.draw_cost(axes, Calibration(CostModel(1e-4), 0.01, 3), samples, 200)
    assert axes[0].get_ylim()[1] < 40
    assert "1 slower than shown (to 900 ms)" in labels(axes[0])
    assert axes[1].get_title(loc="left") == "Attention is not seen yet"


def test_a_time_without_a_slope_is_said_to_have_none() -> None:
    axes = Figure().subplots(1, 2)
    samples = np.array([[100.0, 1e4, 0.02], [200.0, 4e4, 0.02], [300.0, 9e4, 0.02]])
    batch_plots.draw_cost(axes, Calibration(CostModel(0.0, 0.0, 0.02), 0.01, 3), samples, 300)
    assert axes[1].get_title(loc="left") == "All overhead: no length is seen to matter"
    assert not axes[1].get_yticks().size


def test_one_step_has_whole_steps_on_its_axis() -> None:
    axes = Figure().add_subplot()
    batch_plots.draw_efficiency(axes, [7], [0.5], [0.6])
    assert axes.get_xlim() == (6, 8)
    assert axes.get_ylim()[0] < 0.4  # the legend stands below the line
