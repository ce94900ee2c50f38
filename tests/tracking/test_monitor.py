"""The exact log lines, and pictures that are drawn at their interval."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainer.base.errors import UserError
from trainer.batching import Calibrator, CostModel, plan
from trainer.tracking.monitor import DynamicBatchMonitor, device_mesh_line
from trainer.tracking.visualizer import DynamicBatchVisualizer


def test_monitor_line() -> None:
    lines: list[str] = []
    monitor = DynamicBatchMonitor(0, lines.append, interval=2)
    assert monitor.update([16371, 12403]) is None
    monitor.update([15822, 18692, 0])
    assert lines == [
        "[INFO] DynamicBatchMonitor: gpu_0 - avg_tokens=15822, max_tokens=18692, min_tokens=12403, "
        "batch_count=4"
    ]
    monitor.update([5])
    monitor.update([7])
    assert lines[1].endswith("gpu_0 - avg_tokens=6, max_tokens=7, min_tokens=5, batch_count=2")


def test_monitor_of_a_window_without_work() -> None:
    lines: list[str] = []
    DynamicBatchMonitor(3, lines.append, interval=1).update([0, 0])
    assert lines == [
        "[INFO] DynamicBatchMonitor: gpu_3 - avg_tokens=0, max_tokens=0, min_tokens=0, "
        "batch_count=0"
    ]


def test_device_mesh_line() -> None:
    assert device_mesh_line([24, 25, 24]) == (
        "[INFO] DeviceMeshBalancer: dp_rank_0 assigned 24 samples, dp_rank_1 assigned 25 samples, "
        "dp_rank_2 assigned 24 samples"
    )


def test_intervals_must_be_positive() -> None:
    with pytest.raises(UserError, match="monitor_interval=0"):
        DynamicBatchMonitor(0, print, interval=0)
    with pytest.raises(UserError, match="plot_interval=0"):
        DynamicBatchVisualizer(plot_interval=0)


@pytest.mark.parametrize("ranks", [2, 16])
def test_pictures_are_drawn_at_the_interval(tmp_path: Path, ranks: int) -> None:
    rng = np.random.default_rng(0)
    visualizer = DynamicBatchVisualizer(str(tmp_path / "plots"), plot_interval=3)
    calibrator = Calibrator()
    written: list[Path] = []
    for step in (1, 2, 3):
        made = plan(rng.integers(50, 2000, 64), 4096, ranks, cost=CostModel(1e-4, 1e-8))
        for tokens, squares in zip(made.tokens[0], made.squares()[0], strict=True):
            calibrator.add(tokens, squares, 1e-4 * tokens + 1e-8 * squares)
        assert not written
        written = visualizer.update(
            step,
            made,
            boundaries=[64, 256],
            calibration=calibrator.fit(),
            samples=calibrator.samples(),
        )
    assert sorted(p.name for p in written) == [
        "cost_curve_step3.png",
        "efficiency_step3.png",
        "lengths_step3.png",
        "rank_load_step3.png",
        "tokens_per_micro_batch_step3.png",
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 5000 for p in written)
    assert visualizer.draw(4) == []
