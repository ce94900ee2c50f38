"""``benchmarks.learning``: what is finished is read, what was begun is resumed, and the table is of
what the runs logged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import learning
from tests.benchmarks.quick import run_quick

RISES = {"grpo": [0.1, 0.3], "gspo": [0.05, 0.15]}


def finished_run(folder: Path, steps: int, rise: float) -> None:
    folder.mkdir(parents=True)
    rows = [
        {"step": 0, "val/reward": 0.25},
        {"step": 1, "timing/step": 0.5},
        {"step": steps, "timing/step": 1.5, "val/reward": 0.25 + rise},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_runs_are_taken_once_and_their_rise_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[str] = []

    def train(stage: str, seed: int, folder: Path, *more: str) -> None:
        taken.append(f"{folder.name} {seed}")
        steps = learning.STEPS[stage]
        assert f"trainer.total_training_steps={steps}" in more
        if stage == "grpo":
            assert f"actor_rollout_ref.model.path={folder.parent}/sft/huggingface" in more
            assert f"algorithm={folder.name}" in more
        if folder.exists():  # begun before
            (folder / "metrics.jsonl").unlink()
            folder.rmdir()
        finished_run(folder, steps, RISES.get(folder.name, [0, 0])[seed - 1])

    monkeypatch.setattr(learning, "train", train)
    base = tmp_path / "full"
    finished_run(base / "seed_1/grpo", learning.STEPS["grpo"], 0.1)
    finished_run(base / "seed_1/gspo", 7, 0.9)  # interrupted in its seventh step
    out = tmp_path / "out.json"
    arguments = ["--seeds", "1", "2", "--algorithms", "grpo", "gspo", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["learning", *arguments, "--json", str(out)])
    assert learning.main() == 1
    assert taken == ["sft 1", "gspo 1", "sft 2", "grpo 2", "gspo 2"]
    report = json.loads(out.read_text())
    assert [row["rise"] for row in report["rows"]] == pytest.approx([0.2, 0.1])
    assert [row["least"] for row in report["rows"]] == pytest.approx([0.1, 0.05])
    assert report["rows"][0]["step_s"] == 1.0
    assert {name: check["ok"] for name, check in report["checks"].items()} == {
        "rise_grpo": True,
        "rise_gspo": False,
    }
    said = capsys.readouterr().err
    assert "[learning] 2/6 grpo, seed 1: 80 steps\n[learning] was finished in" in said
    taken.clear()
    assert learning.main() == 1 and taken == []


def test_quick_takes_real_runs(tmp_path: Path) -> None:
    report = run_quick(
        "learning", tmp_path, "--algorithms", "gspo", "--seeds", "1", "--folder", str(tmp_path)
    )
    (row,) = report["rows"]
    assert row["algorithm"] == "gspo" and 0 <= row["before"] <= 1 and row["step_s"] > 0
