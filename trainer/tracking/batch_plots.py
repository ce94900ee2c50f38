"""Plots of dynamic batching: each title states the result, each axis has its unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer.batching import Calibration, CostModel
from trainer.tracking.plotting import format_count, label_axes, set_count_axis, set_step_axis

MAX_RANK_LINES = 10
"""Up to so many ranks get a line or colour each; more are drawn as a band."""
MAX_LINEAR_OCTAVES = 3
"""Lengths that span more doublings than this are drawn on a logarithmic axis."""
STALL_RATIO = 1.6
"""Measured times beyond this multiple of the largest prediction are stalls: marked at the edge of
the picture.
"""

Floats = np.ndarray[Any, np.dtype[np.float64]]
Ints = np.ndarray[Any, np.dtype[np.int64]]


def draw_tokens(axes: Any, tokens: Sequence[Sequence[int]], budgets: Sequence[int]) -> None:
    """Histogram of tokens per micro-batch, one colour a rank, with the budget lines.

    ``tokens`` [ranks][micro-batches]; ``budgets`` [ranks].
    """
    largest = max(max(budgets), max((t for rank in tokens for t in rank), default=0))
    edges = np.linspace(0, largest * 1.04, 53)
    if len(tokens) <= MAX_RANK_LINES:
        labels = [f"rank {rank}" for rank in range(len(tokens))]
        axes.hist([list(rank) for rank in tokens], bins=edges, stacked=True, label=labels)
    else:
        together = np.concatenate([np.asarray(rank) for rank in tokens])
        axes.hist(together, bins=edges, label=f"{len(tokens)} ranks together")
    _draw_budgets(axes, budgets)
    axes.set_xlim(0, largest * 1.04)
    set_count_axis(axes.xaxis)
    set_count_axis(axes.yaxis)
    # Below the axes, where it covers no bar or line.
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=6)
    label_axes(axes, _tokens_title(tokens, budgets), "tokens in a micro-batch", "micro-batches")


def _draw_budgets(axes: Any, budgets: Sequence[int]) -> None:
    """A line for each budget, with the ranks that have it."""
    distinct = sorted(set(budgets))
    styles = ["-", "--", "-.", ":"] * len(distinct)
    for budget, style in zip(distinct, styles, strict=False):
        label = f"budget {budget:,}"
        if len(distinct) > 1:
            ranks = [str(rank) for rank, other in enumerate(budgets) if other == budget]
            few = len(ranks) <= MAX_RANK_LINES
            label += f" of rank {', '.join(ranks)}" if few else f" of {len(ranks)} ranks"
        axes.axvline(budget, color="crimson", linewidth=2, linestyle=style, label=label)


def _tokens_title(tokens: Sequence[Sequence[int]], budgets: Sequence[int]) -> str:
    total = 0
    capacity = 0
    over = 0
    for rank_tokens, budget in zip(tokens, budgets, strict=True):
        total += sum(rank_tokens)
        capacity += len(rank_tokens) * budget
        over += sum(count > budget for count in rank_tokens)
    fill = total / capacity if capacity else 0.0
    verdict = f"{over:,} ARE OVER THE BUDGET" if over else "none is over the budget"
    return f"Micro-batches are {fill:.0%} full; {verdict}"


def draw_lengths(axes: Any, lengths: Ints, boundaries: Sequence[int] | None) -> None:
    """How often each length occurs, with bucket edges. ``lengths`` [sequences]."""
    values, counts = np.unique(lengths, return_counts=True)
    label = "a length" if boundaries else None
    axes.scatter(values, counts, s=14, alpha=0.55, linewidths=0, label=label)
    for index, edge in enumerate(boundaries or []):
        label = "bucket edge" if index == 0 else None
        axes.axvline(edge, color="darkorange", linestyle="--", linewidth=1.2, label=label)
    if boundaries:
        axes.legend(frameon=False, fontsize=8)
    x_label = "length of a sequence, tokens"
    if values[-1] > 2**MAX_LINEAR_OCTAVES * values[0]:
        x_label += " (log scale)"
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(format_count)
    else:
        set_count_axis(axes.xaxis)
    set_count_axis(axes.yaxis)
    axes.set_ylim(0, counts.max() * 1.1)
    median, tail = np.percentile(lengths, [50, 99])
    title = (
        f"Half of the sequences are below {median:,.0f} tokens, 1 % above {tail:,.0f} "
        f"(longest {lengths.max():,})"
    )
    label_axes(axes, title, x_label, "sequences of that length")


def draw_loads(axes: Any, steps: Sequence[int], loads: Floats) -> None:
    """Tokens of each rank per step; with many ranks the band from the lightest to the heaviest.

    ``loads`` [steps, ranks].
    """
    mean = loads.mean(1)
    excess = float((loads.max(1) / np.maximum(mean, 1e-9)).mean() - 1.0)
    ranks = loads.shape[1]
    if ranks <= MAX_RANK_LINES:
        for rank in range(ranks):
            # Each thinner than the one before, so that equal lines stay visible.
            width = 1.0 + 0.7 * (ranks - 1 - rank)
            style = {"linewidth": width, "marker": ".", "markersize": width + 3}
            axes.plot(steps, loads[:, rank], label=f"rank {rank}", **style)
    else:
        label = f"lightest to heaviest of {ranks} ranks"
        axes.fill_between(steps, loads.min(1), loads.max(1), alpha=0.3, label=label)
        axes.plot(steps, mean, linewidth=1.2, marker=".", markersize=4, label="mean")
    axes.legend(frameon=False, fontsize=8, ncols=5, loc="upper left")
    axes.set_ylim(0, loads.max() * 1.3)
    set_count_axis(axes.yaxis)
    set_step_axis(axes, steps)
    title = f"The fullest rank holds {excess:.1%} more tokens than the mean"
    label_axes(axes, title, "step", "tokens of a rank per step")


def draw_efficiency(
    axes: Any, steps: Sequence[int], efficiency: Sequence[float], bound: Sequence[float]
) -> None:
    """Predicted efficiency of each step against the best that any plan could reach."""
    best = np.minimum(bound, 1.0)
    label = "gap: what a better plan could win"
    axes.fill_between(steps, efficiency, best, color="darkorange", alpha=0.35, label=label)
    label = "proven upper bound of any plan"
    axes.plot(steps, best, color="grey", linewidth=1, linestyle="--", label=label)
    axes.plot(steps, efficiency, linewidth=1.5, marker=".", markersize=4, label="this plan")
    axes.legend(frameon=False, fontsize=8, loc="lower left", ncols=3)
    span = max(0.02, 1.0 - min(efficiency))
    axes.set_ylim(max(0.0, 1.0 - 1.3 * span), 1.0 + 0.05 * span)
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:.1%}" if span < 0.2 else f"{v:.0%}")
    set_step_axis(axes, steps)
    mean = float(np.mean(efficiency))
    title = (
        f"Ranks compute {mean:.2%} of the time; they wait {1 - mean:.2%} for the slowest "
        "(predicted)"
    )
    label_axes(axes, title, "step", "computing share of the ranks' time")


def draw_cost(axes: Any, calibration: Calibration, samples: Floats, longest: int) -> None:
    """Measured micro-batch times against the calibrated model, and the model's time of one sequence
    by its length.

    ``axes``: left and right; ``samples`` [micro-batches, 3]: tokens, squares, seconds; ``longest``:
    tokens of the longest sequence.
    """
    left, right = axes
    _draw_fit(left, calibration, samples)
    _draw_sequence_cost(right, calibration.cost, longest)


def _draw_fit(axes: Any, calibration: Calibration, samples: Floats) -> None:
    cost: CostModel = calibration.cost
    seconds = cost.linear * samples[:, 0] + cost.quadratic * samples[:, 1] + cost.overhead
    predicted_ms = seconds * 1e3
    measured_ms = samples[:, 2] * 1e3
    top = float(predicted_ms.max()) * 1.08
    stalled = measured_ms > STALL_RATIO * top
    axes.scatter(
        predicted_ms[~stalled],
        measured_ms[~stalled],
        s=14,
        alpha=0.5,
        linewidths=0,
        label="micro-batch",
    )
    axes.plot([0, top], [0, top], color="crimson", linewidth=1.5, label="prediction = measurement")
    if stalled.any():
        edge = np.full(int(stalled.sum()), STALL_RATIO * top)
        axes.scatter(
            predicted_ms[stalled],
            edge,
            s=22,
            marker="^",
            color="grey",
            clip_on=False,
            linewidths=0,
            label=f"{edge.size:,} slower than shown (to {measured_ms.max():,.0f} ms)",
        )
    axes.set_xlim(0, top)
    axes.set_ylim(0, STALL_RATIO * top)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    title = f"Cost model off by {calibration.error:.1%} (median)"
    label_axes(axes, title, "predicted time of a micro-batch, ms", "measured time, ms")


def _draw_sequence_cost(axes: Any, cost: CostModel, longest: int) -> None:
    """The predicted time of one sequence by its length, without the overhead."""
    length = np.linspace(0, longest, 200)
    linear_ms = cost.linear * length * 1e3
    square_ms = cost.quadratic * length**2 * 1e3
    largest = float((linear_ms + square_ms)[-1])
    if largest > 0:
        names = ["grows with the length", "attention: grows with its square"]
        axes.stackplot(length, linear_ms, square_ms, labels=names, alpha=0.6)
        axes.set_ylim(0, largest * 1.25)
    if 0 < cost.ratio <= longest:
        label = f"equal at {cost.ratio:,.0f} tokens"
        axes.axvline(cost.ratio, color="black", linestyle=":", linewidth=1.2, label=label)
    axes.set_xlim(0, longest)
    set_count_axis(axes.xaxis)
    if largest > 0:
        axes.legend(frameon=False, fontsize=8, loc="upper left")
        title = f"Attention: {float(square_ms[-1]) / largest:.0%} of the longest's cost"
    else:
        axes.set_yticks([])
        title = "All overhead: no length is seen to matter"
    if largest > 0 and not cost.quadratic:
        title = "Attention is not seen yet"
    label_axes(axes, title, "length of a sequence, tokens", "predicted time of one sequence, ms")
