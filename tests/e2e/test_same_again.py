"""A run repeated from its frozen config, stopped and continued, or killed and continued, ends in the same weights."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.runs import GRPO, SFT, assert_same, finish, interrupt, metrics, rows

STEPS = 6
EACH_STEP = "trainer.checkpoint.save_freq=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def sft(folder: Path) -> Path:
    finish(folder / "sft", *SFT, f"trainer.total_training_steps={STEPS}", EACH_STEP)
    assert sorted(metrics(folder / "sft")) == list(range(1, STEPS + 1))
    return folder / "sft"


@pytest.fixture(scope="module")
def grpo(folder: Path) -> Path:
    screen = finish(folder / "grpo", *GRPO, f"trainer.total_training_steps={STEPS}", "trainer.n_gpus_per_node=2")
    assert f"Done: {STEPS} steps" in screen
    return folder / "grpo"


def test_old_equals_new_from_the_frozen_config(sft: Path, tmp_path: Path) -> None:
    finish(tmp_path / "again", "--config-path", str(sft), "--config-name", "config")
    assert_same(tmp_path / "again", sft)


def test_stopped_and_continued_sft(sft: Path, tmp_path: Path) -> None:
    run, arguments = tmp_path / "run", [*SFT, f"trainer.total_training_steps={STEPS}", EACH_STEP]
    code, screen = interrupt(run, signal.SIGTERM, *arguments, step=1)
    assert code == 85, screen
    note = json.loads((run / "exit.json").read_text())
    assert note["cause"] == "TERM" and note["step"] == rows(run)[-1]["training/global_step"] < STEPS
    assert "Going on from" in finish(run, *arguments)
    assert_same(run, sft)


def test_killed_and_continued_sft(sft: Path, tmp_path: Path) -> None:
    run, arguments = tmp_path / "run", [*SFT, f"trainer.total_training_steps={STEPS}", EACH_STEP]
    code, screen = interrupt(run, signal.SIGKILL, *arguments, step=2)
    assert code == -signal.SIGKILL, screen
    finish(run, *arguments)
    assert_same(run, sft)


def test_stopped_and_continued_grpo_on_two_ranks(grpo: Path, tmp_path: Path) -> None:
    run, arguments = tmp_path / "run", [*GRPO, f"trainer.total_training_steps={STEPS}", "trainer.n_gpus_per_node=2"]
    code, screen = interrupt(run, signal.SIGTERM, *arguments, step=2)
    assert code == 85, screen
    finish(run, *arguments)
    assert_same(run, grpo)


def test_two_ranks_then_one_then_two(folder: Path) -> None:
    """Elastic: the run goes on with as many ranks as it is given."""
    for ranks, steps in ((2, 1), (1, 2), (2, 3)):
        finish(folder / "elastic", *GRPO, f"trainer.total_training_steps={steps}", f"trainer.n_gpus_per_node={ranks}")
    assert sorted(metrics(folder / "elastic")) == [1, 2, 3]
