"""A run repeated from its frozen config, stopped and continued, or killed and continued, ends in
the same weights.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import GRPO, SFT, assert_same, finish, interrupt, metrics, rows

STEPS = 6
EACH_STEP = "trainer.checkpoint.save_freq=1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


STAGES = {"sft": [*SFT, EACH_STEP], "grpo": GRPO}
RUNS = [(stage, ranks) for stage in STAGES for ranks in (1, 2)]


LEFT_OVER = ["actor_rollout_ref.rollout.over_sampling=1.5", "algorithm.max_staleness=1"]
"""Prompts that one step began and another ends: they too have to come back from a checkpoint."""


def arguments(stage: str, ranks: int) -> list[str]:
    more = LEFT_OVER if (stage, ranks) == ("grpo", 2) else []
    return [
        *STAGES[stage],
        *more,
        f"trainer.total_training_steps={STEPS}",
        f"trainer.n_gpus_per_node={ranks}",
    ]


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Callable[[str, int], Path]:
    @cache
    def run(stage: str, ranks: int) -> Path:
        path = folder / f"{stage}-{ranks}"
        screen = finish(path, *arguments(stage, ranks))
        assert f"Done: {STEPS} steps" in screen and sorted(metrics(path)) == list(
            range(1, STEPS + 1)
        )
        return path

    return run


def test_old_equals_new_from_the_frozen_config(
    undisturbed: Callable[[str, int], Path], tmp_path: Path
) -> None:
    before = undisturbed("sft", 1)
    finish(tmp_path / "again", "--config-path", str(before), "--config-name", "config")
    assert_same(tmp_path / "again", before)


@pytest.mark.parametrize(("stage", "ranks"), RUNS)
def test_stopped_and_continued(
    undisturbed: Callable[[str, int], Path], tmp_path: Path, stage: str, ranks: int
) -> None:
    run = tmp_path / "run"
    code, screen = interrupt(run, signal.SIGTERM, *arguments(stage, ranks), step=2, before=STEPS)
    assert code == 85, screen
    note = json.loads((run / "exit.json").read_text())
    assert note["cause"] == "TERM" and note["step"] == rows(run)[-1]["training/global_step"] < STEPS
    assert "Going on from" in finish(run, *arguments(stage, ranks))
    assert_same(run, undisturbed(stage, ranks))


@pytest.mark.parametrize(("stage", "ranks"), [("sft", 1), ("grpo", 2)])
def test_killed_and_continued(
    undisturbed: Callable[[str, int], Path], tmp_path: Path, stage: str, ranks: int
) -> None:
    run, given = tmp_path / "run", [*arguments(stage, ranks), EACH_STEP]
    code, screen = interrupt(run, signal.SIGKILL, *given, step=2, before=STEPS)
    assert code == -signal.SIGKILL, screen
    finish(run, *given)
    assert_same(run, undisturbed(stage, ranks))
    assert_goodput(rows(run))


def assert_goodput(record: list[dict[str, Any]]) -> None:
    """Of two attempts: only the steps that count are productive, and starting twice took its
    time.
    """
    last, steps = record[-1], {row["training/global_step"]: row["timing/step"] for row in record}
    assert (
        last["goodput/attempts"] == 2
        and 0 < last["goodput/ettr_with_queue"] <= last["goodput/ettr"] < 1
    )
    assert abs(last["goodput/productive_s"] - sum(steps.values())) < 0.01
    assert last["goodput/wall_s"] > last["goodput/productive_s"] + last["goodput/lost_s"]


def test_two_ranks_then_one_then_two(folder: Path) -> None:
    """Elastic: the run goes on with as many ranks as it is given."""
    for ranks, steps in ((2, 1), (1, 2), (2, 3)):
        finish(
            folder / "elastic",
            *GRPO,
            f"trainer.total_training_steps={steps}",
            f"trainer.n_gpus_per_node={ranks}",
        )
    assert sorted(metrics(folder / "elastic")) == [1, 2, 3]
