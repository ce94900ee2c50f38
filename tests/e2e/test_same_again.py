"""A run that is repeated from its frozen config, or is stopped or killed and then continued, ends
with the same weights.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import GRPO, SFT, assert_same, finish, interrupt, metrics, rows
from trainer.base.rank_records import read_records

STEPS = 6
EACH_STEP = "trainer.checkpoint.save_freq=1"
PPO = [
    *GRPO,
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "trainer.critic_warmup=1",
    "critic.zero_stage=2",
    "critic.ppo_epochs=2",
]
"""A critic that trains alone at first, under another ZeRO stage than the policy."""
STAGES = {"sft": [*SFT, EACH_STEP], "grpo": GRPO, "ppo": PPO}
RUNS = [("sft", 1), ("sft", 2), ("grpo", 1), ("grpo", 2), ("ppo", 2)]
PARTIAL_ROLLOUTS = ["actor_rollout_ref.rollout.over_sampling=1.5", "algorithm.max_staleness=1"]
"""Responses that one step begins and another finishes: a checkpoint has to hold them too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def arguments(stage: str, ranks: int) -> list[str]:
    more = PARTIAL_ROLLOUTS if (stage, ranks) == ("grpo", 2) else []
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
        empty_cache = str(folder / f"cache-{stage}-{ranks}")  # the ranks make the model together
        screen = finish(path, *arguments(stage, ranks), PLIMSOLL_CACHE=empty_cache)
        assert f"Done: {STEPS} steps" in screen
        assert sorted(metrics(path)) == list(range(1, STEPS + 1))
        return path

    return run


def test_a_run_repeated_from_its_frozen_config_ends_with_the_same_weights(
    undisturbed: Callable[[str, int], Path], tmp_path: Path
) -> None:
    before = undisturbed("sft", 1)
    finish(tmp_path / "again", "--config-path", str(before), "--config-name", "config")
    assert_same(tmp_path / "again", before)


@pytest.mark.parametrize(("stage", "ranks"), RUNS)
def test_a_stopped_run_continues_to_the_same_weights(
    undisturbed: Callable[[str, int], Path], tmp_path: Path, stage: str, ranks: int
) -> None:
    run = tmp_path / "run"
    code, screen = interrupt(run, signal.SIGTERM, *arguments(stage, ranks), step=2, before=STEPS)
    assert code == 85, screen
    records = read_records(run / "logs/attempt_1")
    ends = [record.end for record in records.values() if record.end is not None]
    assert [(end.kind, end.stop) for end in ends] == [("stopped", "TERM")] * ranks
    assert {end.step for end in ends} == {rows(run)[-1]["training/global_step"]}
    assert ends[0].step < STEPS
    assert "Going on from" in finish(run, *arguments(stage, ranks))
    assert_same(run, undisturbed(stage, ranks))


@pytest.mark.parametrize(("stage", "ranks"), [("sft", 1), ("grpo", 2)])
def test_a_killed_run_continues_to_the_same_weights(
    undisturbed: Callable[[str, int], Path], tmp_path: Path, stage: str, ranks: int
) -> None:
    run = tmp_path / "run"
    settings = [*arguments(stage, ranks), EACH_STEP]
    code, screen = interrupt(run, signal.SIGKILL, *settings, step=2, before=STEPS)
    assert code == -signal.SIGKILL, screen
    finish(run, *settings)
    assert_same(run, undisturbed(stage, ranks))
    assert_goodput(rows(run))


def assert_goodput(record: list[dict[str, Any]]) -> None:
    """Two attempts: a repeated step is productive only once, and starting twice takes time."""
    last = record[-1]
    step_s = {row["training/global_step"]: row["timing/step"] for row in record}
    assert last["goodput/attempts"] == 2
    assert 0 < last["goodput/ettr_with_queue"] <= last["goodput/ettr"] < 1
    assert abs(last["goodput/productive_s"] - sum(step_s.values())) < 0.01
    assert last["goodput/wall_s"] > last["goodput/productive_s"] + last["goodput/lost_s"]


def test_a_run_continues_on_another_number_of_ranks(folder: Path) -> None:
    """Two ranks, then one, then two."""
    for ranks, steps in ((2, 1), (1, 2), (2, 3)):
        finish(
            folder / "elastic",
            *GRPO,
            f"trainer.total_training_steps={steps}",
            f"trainer.n_gpus_per_node={ranks}",
        )
    assert sorted(metrics(folder / "elastic")) == [1, 2, 3]
