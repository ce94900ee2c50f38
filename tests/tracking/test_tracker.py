"""One object takes the metrics of a run: record, screen and W&B hold the same."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tracking.wandb_file import history, only
from tests.tracking.watermarks import watermarks
from trainer.base.errors import UserError
from trainer.base.metrics_file import TIMING_PREFIXES, read_metrics
from trainer.tracking import Tracker
from trainer.tracking.optional_output import optional_output


def make(folder: Path, loggers: tuple[str, ...] = ("console",), **settings: Any) -> Tracker:
    known: dict[str, Any] = {
        "rank": 0,
        "project": "p",
        "name": "n",
        "total_steps": 6,
        "watermarks": watermarks(),
        "mode": "offline",
    }
    return Tracker(folder, {"seed": 1}, loggers=list(loggers), **(known | settings))


def log_steps(tracker: Tracker, first: int, last: int) -> None:
    for step in range(first, last + 1):
        tracker.log(step, {"reward/mean": torch.tensor(step / 4), "timing/step": 1.0})


def test_a_resumed_run_has_the_record_of_an_uninterrupted_one(tmp_path: Path) -> None:
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    whole = make(tmp_path / "whole")
    log_steps(whole, 1, 6)
    whole.close(0)
    killed = make(tmp_path / "resumed")
    log_steps(killed, 1, 5)  # the last checkpoint is that of step 3
    again = make(tmp_path / "resumed", steps_done=3)
    log_steps(again, 4, 6)
    again.close(0)

    def comparable(folder: str) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in record.items() if not k.startswith(TIMING_PREFIXES)}
            for record in read_metrics(tmp_path / folder / "metrics.jsonl")
        ]

    assert comparable("resumed") == comparable("whole")
    assert [r["step"] for r in comparable("whole")] == [1, 2, 3, 4, 5, 6]


def test_metrics_that_are_only_recorded_are_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(tmp_path)
    assert tracker.record(3, {"ckpt/write_s": torch.tensor(0.5)}) == {"ckpt/write_s": 0.5}
    tracker.close(0)
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert line["step"] == 3 and line["ckpt/write_s"] == 0.5 and capsys.readouterr().out == ""


def test_only_rank_0_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = make(tmp_path, ("console", "wandb"), rank=1)
    tracker.log(1, {"a": 1.0})
    tracker.log_generations(1, [{"a": "b"}])
    tracker.message("hello")
    tracker.sync()
    tracker.close(0)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == "hello\n"  # the launcher keeps it in this rank's log


def test_record_screen_and_wandb_have_the_same_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(tmp_path, ("console", "wandb"))
    folder = tracker.wandb_folder
    assert folder is not None
    tracker.log(1, {"reward/mean": 0.25})
    tracker.close(2)
    tracker.close(0)  # on the way out: the first call counts
    assert "step:1/6 - reward/mean:0.25" in capsys.readouterr().out
    (record,) = read_metrics(tmp_path / "metrics.jsonl")
    (row,) = history(folder)
    assert record["reward/mean"] == row["reward/mean"] == 0.25
    assert only(folder, "exit").exit_code == 2


def test_without_loggers_there_is_still_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(tmp_path, ())
    tracker.log(1, {"a": 1})
    tracker.close(0)
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 1
    assert not (tmp_path / "wandb").exists() and capsys.readouterr().out == ""


def test_generations_have_one_file_per_step(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    for score in (torch.tensor(0.0), torch.tensor(1.0)):  # taken again after a resume
        tracker.log_generations(2, [{"prompt": "1+1=", "answer": "é", "score": score}])
    tracker.close(0)
    (line,) = (tmp_path / "generations" / "step_2.jsonl").read_text().splitlines()
    assert json.loads(line) == {"prompt": "1+1=", "answer": "é", "score": 1.0}


def test_a_hint_comes_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = make(tmp_path, num_workers=1, watermarks=watermarks(worker_share=1.0))
    for step in range(1, 10):
        tracker.log(step, {"timing/step": 1.0, "timing/data_wait": 0.5})
    tracker.close(0)
    out = capsys.readouterr().out
    assert out.count("[HINT]") == 1 and "data.num_workers (now 1)" in out


def test_an_unknown_logger_and_an_unwritable_folder_are_user_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'wandbb' is not a logger here; did you mean 'wandb'"):
        make(tmp_path, ("wandbb",))
    with pytest.raises(UserError, match="Choose from auto, online, offline, disabled"):
        make(tmp_path, mode="on")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"trainer\.default_local_dir"):
        make(tmp_path / "file")


def test_too_many_workers_are_a_hint_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, num_workers=10_000).close(0)
    assert "[HINT] data.num_workers=10000 on 1 rank(s)" in capsys.readouterr().out


def test_one_logger_may_be_a_string(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(
        tmp_path,
        {},
        rank=0,
        loggers="console",
        project="p",
        name="n",
        total_steps=1,
        watermarks=watermarks(),
        mode="offline",
    )
    tracker.log(1, {"a": 1})
    tracker.close(0)
    assert capsys.readouterr().out == "step:1/1 - a:1\n"


def test_generations_that_the_disk_does_not_take_cost_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(tmp_path)
    tracker.log_generations(1, [{"answer": "first"}])
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "replace", full)
        tracker.log_generations(1, [{"answer": "second"}])
    tracker.close(0)
    (line,) = (tmp_path / "generations" / "step_1.jsonl").read_text().splitlines()
    assert "first" in line, "what was there is whole"
    assert "[WARNING]" in capsys.readouterr().out
    with pytest.raises(ValueError), optional_output("plots/", print):
        raise ValueError("a bug stays one")
