"""A W&B run made again from the record."""

from __future__ import annotations

from pathlib import Path

import pytest
import wandb

from tests.tracking.wandb_file import history, only
from trainer.base.metrics_file import MetricsFile
from trainer.tracking.rebuild import main, rebuild
from trainer.tracking.wandb_run import WandbIdentity, load_identity


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    (tmp_path / "config.yaml").write_text(
        "actor_rollout_ref: {rollout: {n: 2}}\n"
        "trainer:\n  project_name: plim\n  experiment_name: best\n  seed: 3\n"
    )
    file = MetricsFile(tmp_path / "metrics.jsonl", 0)
    for record in (
        {"step": 0, "time": 1.0, "val/reward": 0.1},
        {"step": 1, "time": 2.0, "reward/mean": 0.5},
        {"step": 2, "time": 3.0, "reward/mean": 0.6},
        {"step": 2, "time": 3.5, "val/reward": 0.7},
    ):
        file.append(record)
    file.close()
    return tmp_path


def test_the_wandb_run_comes_back_from_the_record(run: Path) -> None:
    folder, steps, run_id = rebuild(run)
    assert folder is not None and steps == 3
    assert load_identity(run) == WandbIdentity(run_id, "plim", "best", None)
    rows = [{k: v for k, v in row.items() if not k.startswith("_")} for row in history(folder)]
    assert rows == [
        {"training/global_step": 0, "val/reward": 0.1},
        {"training/global_step": 1, "reward/mean": 0.5},
        {"training/global_step": 2, "reward/mean": 0.6, "val/reward": 0.7},
    ]
    record = only(folder, "run")
    assert (record.project, record.display_name) == ("plim", "best")


def test_a_new_id_leaves_the_runs_own_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "wandb.json").write_text(
        '{"id": "abcdefgh", "project": "p", "name": "n", "group": "sweep-1"}'
    )
    assert main([str(run), "--new-id"]) == 0
    out = capsys.readouterr().out
    assert "abcdefgh" not in out and "wandb sync" in out and load_identity(run).id == "abcdefgh"
    (folder,) = (run / "wandb_rebuilt" / "wandb").glob("offline-run-*")
    assert only(folder, "run").run_group == "sweep-1"


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "metrics.jsonl doesn't exist" in capsys.readouterr().err
