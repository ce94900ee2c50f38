"""A run that goes wrong rights itself, or ends with its last good checkpoint whole."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import sabotaged_worker
from tests.e2e.runs import GRPO, SFT, finish, rows
from tests.e2e.sabotaged_worker import SABOTAGE
from trainer.checkpoint.store import manifest
from trainer.checkpoint.store.layout import newest_whole, steps_on_disk

WORKER = {"PLIMSOLL_WORKER_MODULE": sabotaged_worker.__name__}
EASY_REWARD = """
# Three different digits: a policy that writes one token over and over gets little.
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return min(len(set(solution_str) & set("0123456789")), 3) / 3
"""
LEARNS = [
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.optim.lr=2e-3",
    "data.val_max_samples=32",
    "trainer.test_freq=2",
    "trainer.total_training_steps=36",
    "trainer.rollback.enable=true",
    "trainer.rollback.patience=1",
    "trainer.rollback.min_delta=0.15",
    "trainer.export_hf=false",
]


def test_a_sabotaged_run_rolls_back_and_ends_as_the_clean_one(tmp_path: Path) -> None:
    reward = tmp_path / "digits.py"
    reward.write_text(EASY_REWARD)
    settings = [*GRPO, *LEARNS, f"custom_reward_function.path={reward}"]
    finish(tmp_path / "clean", *settings)
    screen = finish(tmp_path / "bad", *settings, **WORKER, **{SABOTAGE: "27:100"})
    clean = rows(tmp_path / "clean")
    bad = rows(tmp_path / "bad")
    assert "Rolled back at step 28 to the weights and optimizer of step" in screen
    assert not any("training/rollbacks" in row for row in clean)
    assert clean[-1]["val/reward"] > 0.8
    assert abs(clean[-1]["val/reward"] - bad[-1]["val/reward"]) <= 0.05


def test_weights_that_become_nan_end_the_run_with_the_step_before_whole(tmp_path: Path) -> None:
    settings = [*SFT, "trainer.total_training_steps=6", "trainer.checkpoint.save_freq=1"]
    screen = finish(tmp_path, *settings, code=2, **WORKER, **{SABOTAGE: "3-:nan"})
    assert "Error: Step 3 is not saved: " in screen and "holds NaN or infinity" in screen
    root = tmp_path / "checkpoints"
    newest = newest_whole(root)
    assert newest is not None and newest[1].step == 2
    assert 3 not in steps_on_disk(root)
    assert manifest.problems(*newest) == []
