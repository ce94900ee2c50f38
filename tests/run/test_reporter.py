"""What the screen says of saves that failed and of steps that are taken again."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.base.metrics_file import ReplacedSteps
from trainer.base.run_folder import upload_command
from trainer.run.reporter import RunReporter, replaced_note
from trainer.tracking.rebuild import rebuild


def test_each_save_that_fails_is_shown_once(tmp_path: Path) -> None:
    shown: list[str] = []
    reporter: Any = object.__new__(RunReporter)
    reporter._ctx = SimpleNamespace(world=SimpleNamespace(is_main=True))
    reporter._checkpoints = SimpleNamespace(newest=None, last_failure="No space left")
    reporter._tracker = SimpleNamespace(log=lambda step, metrics: None, message=shown.append)
    reporter._failed_saves = 0.0
    for step, failed in enumerate((0.0, 1.0, 1.0, 2.0, 0.0), 1):
        reporter._checkpoints.newest = tmp_path / "step_1" if step > 2 else None
        reporter.log(step, {"ckpt/failed_in_a_row": failed})
    reporter.log(6, {"ckpt/failed_in_a_row": 1.0})
    assert [text.split(". ")[1].split(";")[0] for text in shown] == [
        "Failed in a row: 1",
        "Failed in a row: 2",
        "Failed in a row: 1",
    ]
    assert all(text.startswith("[ERROR] No space left") for text in shown)
    assert "no checkpoint yet" in shown[0] and str(tmp_path / "step_1") in shown[1]


@pytest.mark.parametrize("folder", ["run", "a run; with 'odd' name"])
def test_the_command_that_uploads_a_run_can_be_pasted(tmp_path: Path, folder: str) -> None:
    reporter: Any = object.__new__(RunReporter)
    reporter._ctx = SimpleNamespace(run_dir=tmp_path / folder)
    reporter._tracker = SimpleNamespace(wandb_url=None, wandb_folder=tmp_path / folder / "wandb")
    place, _, command = reporter.wandb_location.partition("  (upload: ")
    assert place == str(tmp_path / folder / "wandb")
    assert shlex.split(command.removesuffix(")")) == upload_command(tmp_path / folder)
    # up to the folder's contents it works for a run that no ledger knows
    with pytest.raises(UserError, match="give the folder of a run"):
        rebuild(tmp_path / folder, online=True)


def test_steps_that_are_taken_again_are_named(tmp_path: Path) -> None:
    replaced = ReplacedSteps(16, 27, tmp_path / "metrics.before_attempt_2.jsonl")
    note = replaced_note(replaced, 15)
    assert "Steps 16 to 27" in note and "after step 15" in note and str(replaced.file) in note
    note = replaced_note(ReplacedSteps(0, 25, replaced.file), 0)
    assert "ended at step 25, before its first checkpoint" in note and "begins again" in note
    assert "trainer.checkpoint.save_interval_minutes" in note and str(replaced.file) in note
