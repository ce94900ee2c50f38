"""Which runs the words of ``python -m jobs`` mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jobs import ledger
from jobs.__main__ import main
from jobs.ledger import Entry
from jobs.view.found import find_runs
from trainer.base.errors import UserError


def made_run(folder: Path, wandb_id: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n{"step": 2, "cr')
    if wandb_id:
        (folder / "wandb.json").write_text(json.dumps({"id": wandb_id}))
    return folder


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``runs`` with two runs of no ledger, a sweep of two, and a folder that is none."""
    monkeypatch.chdir(tmp_path)
    made_run(tmp_path / "runs/one", "abc123")
    made_run(tmp_path / "runs/two")
    for number in (10, 9):
        made_run(tmp_path / f"sweep/{number}")
    (tmp_path / "empty").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["runs/one"], ["one"]),
        (["runs/one", "runs/../runs/one"], ["one"]),
        (["runs/*"], ["one", "two"]),
        (["sweep"], ["9", "10"]),
        (["abc123"], ["one"]),
        (["two-of", "runs/one"], None),
        (["empty"], None),
        (["runs/x*"], None),
    ],
)
def test_words_without_a_ledger(folders: Path, words: list[str], names: list[str] | None) -> None:
    if names is None:
        with pytest.raises(UserError, match="is no run"):
            find_runs(folders / "none.jsonl", words)
        return
    assert [entry.name for entry in find_runs(folders / "none.jsonl", words)] == names


def test_a_folder_of_the_ledger_keeps_its_name(folders: Path) -> None:
    known = Entry(
        name="s/0",
        sweep="s",
        run=str(folders / "sweep/9"),
        signature="",
        overrides=("a=1",),
        shape="",
        gpus=1,
        launch="L",
    )
    ledger.append(folders / "ledger.jsonl", [known])
    found = find_runs(folders / "ledger.jsonl", ["s", "sweep", "abc123"])
    assert [entry.name for entry in found] == ["s/0", "10", "one"]


def test_two_folders_of_one_name_are_told_apart(folders: Path) -> None:
    made_run(folders / "more/one")
    found = find_runs(folders / "none.jsonl", ["runs/one", "more/one"])
    assert [entry.name for entry in found] == ["runs/one", "more/one"]


@pytest.mark.parametrize("command", ["status", "watch", "compare"])
def test_commands_need_no_ledger(
    folders: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--ledger", "none.jsonl", command, "runs/*"]) == 0
    said = capsys.readouterr().out
    assert "one" in said and "0.5" in said
