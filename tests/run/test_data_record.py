"""A run reads the data that it was started with, in every attempt and on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.data.toy import encoder
from tests.ranks.worlds import single_rank
from trainer.base.errors import UserError
from trainer.data import FileDataset, Keys
from trainer.run.data_record import FILE, check_data_files


def dataset(path: Path, answers: str, key: str = "data.train_files") -> FileDataset:
    path.write_text(
        "".join(json.dumps({"prompt": "q", "answer": answer}) + "\n" for answer in answers)
    )
    return FileDataset([path], Keys(), encoder(), key=key)


def check(run: Path, train: FileDataset, val: FileDataset | None, *, accept: bool = False) -> None:
    check_data_files(run, single_rank(), (train, val), accept=accept)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return run


def test_other_data_are_refused_once_the_run_has_trained(run: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    val = tmp_path / "val.jsonl"
    check(run, dataset(train, "12"), dataset(val, "3", "data.val_files"))
    check(run, dataset(train, "21"), dataset(val, "3", "data.val_files"))  # nothing trained yet
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    check(run, dataset(train, "21"), dataset(val, "3", "data.val_files"))
    with pytest.raises(
        UserError,
        match=r"data\.train_files: .*train\.jsonl is not .*other content in as many bytes",
    ):
        check(run, dataset(train, "12"), dataset(val, "3", "data.val_files"))
    with pytest.raises(
        UserError, match=r"data\.val_files: .*val\.jsonl is not .* bytes then, \d+ now"
    ) as caught:
        check(run, dataset(train, "21"), dataset(val, "34", "data.val_files"))
    assert "train.jsonl" not in str(caught.value)
    assert "trainer.accept_changed_files=true" in str(caught.value)
    check(run, dataset(train, "21"), dataset(val, "34", "data.val_files"), accept=True)
    check(run, dataset(train, "21"), dataset(val, "34", "data.val_files"))
    moved = dataset(tmp_path / "moved.jsonl", "21")
    check(run, moved, dataset(val, "34", "data.val_files"))
    assert (run / FILE).stat().st_mode & 0o077 == 0


def test_a_run_without_a_record_gets_one(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    (run / FILE).write_text('{"files": ')
    check(run, dataset(tmp_path / "train.jsonl", "1"), None)
    (entry,) = json.loads((run / FILE).read_text())["files"]
    assert entry["key"] == "data.train_files" and entry["size"] == 31


def test_ranks_that_read_different_files_are_told(run: Path, tmp_path: Path) -> None:
    train = dataset(tmp_path / "train.jsonl", "1")
    other: Any = SimpleNamespace(
        is_main=False,
        any=lambda flag: flag,
        gather=lambda value: [value, None] if isinstance(value, str) else [value, ["other"]],
    )
    with pytest.raises(UserError, match=r"ranks read different data \(.*train\.jsonl"):
        check_data_files(run, other, (train, None), accept=False)
