"""Pictures of a run show the numbers of its record."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from trainer.tracking import pictures
from trainer.tracking.perf import micro_batch_metrics
from trainer.tracking.pictures import draw_pictures, main, series, smooth


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(13):
            metrics: dict[str, object] = {"step": step}
            if step % 6 == 0:
                metrics["val/reward"] = 0.1 + step / 20
            if step:
                metrics |= {
                    "critic/score/mean": step / 20,
                    **micro_batch_metrics([900, 1000, 500, 0], 1024),
                }
            file.write(json.dumps(metrics) + "\n")
    return tmp_path


def test_pictures_hold_the_runs_numbers(run: Path) -> None:
    steps = pictures.by_step(run / "metrics.jsonl")
    axes = Figure().add_subplot()
    assert pictures.draw_micro_batches(axes, steps)
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["mean"] == [800.0] * 12 and lines["budget (1,024)"] == [1024.0, 1024.0]
    assert axes.get_title(loc="left") == "Tokens per micro-batch: 78% of the budget on average"
    axes = Figure().add_subplot()
    assert pictures.draw_rewards(axes, steps)
    lines = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert lines["validation reward"] == [0.1, 0.4, 0.7]
    assert lines["train reward"] == [s / 20 for s in range(1, 13)]
    assert axes.get_title(loc="left") == "Reward over steps: validation 0.1 → 0.7"


def test_only_what_the_run_logged_is_drawn(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run)]) == 0
    files = [Path(line) for line in capsys.readouterr().out.split()]
    assert [f.name for f in files] == ["reward.png", "tokens_per_micro_batch.png"]
    for file in files:
        pixels = imread(file)
        assert pixels.shape[0] > 400 and pixels[..., :3].min() < 0.3 < 0.99 < pixels[..., :3].max()


def test_budgets_that_change_are_a_stepped_line() -> None:
    axes = Figure().add_subplot()
    steps = {s: {"step": s, **micro_batch_metrics([500], b)} for s, b in ((1, 1024), (2, 512))}
    assert pictures.draw_micro_batches(axes, steps)
    assert [list(line.get_ydata()) for line in axes.get_lines()][1] == [1024.0, 512.0]


@pytest.mark.parametrize(
    ("tokens", "ranges"), [([500, 900], ["smallest to largest micro-batch"]), ([500], [])]
)
def test_the_legend_names_a_range_only_where_one_is_seen(
    tokens: list[int], ranges: list[str]
) -> None:
    axes = Figure().add_subplot()
    steps = {step: {"step": step, **micro_batch_metrics(tokens, 1024)} for step in (1, 2)}
    assert pictures.draw_micro_batches(axes, steps)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [*ranges, "mean", "budget (1,024)"]


def test_series_leave_out_values_that_are_not_finite() -> None:
    steps = {1: {"a": math.nan}, 2: {"a": 1.0}, 3: {"a": math.inf}, 4: {"b": 2}}
    assert series(steps, ["x", "a", "b"]) == ([2], [1.0])
    assert smooth([1.0, 1.0, 1.0]) == pytest.approx([1.0, 1.0, 1.0])


def test_no_record_no_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl doesn't exist" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text("")
    assert draw_pictures(tmp_path) == []
