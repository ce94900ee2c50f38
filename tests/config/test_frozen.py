"""The run folder's settings: private, whole, and binding once training began."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.config.helpers import minimal_settings
from trainer.base.errors import UserError
from trainer.config import freeze, load, load_frozen, run_dir_of
from trainer.config.keys.tree import format_value

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def settings(run: Path, **changes: object) -> object:
    return load(minimal_settings(**{"trainer.default_local_dir": str(run), **changes}))


def test_frozen_settings_are_private_and_equal(tmp_path: Path):
    config = settings(tmp_path / "a" / "run")
    path = freeze(config, run_dir_of(config))
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert load_frozen(path.parent) == config
    assert os.listdir(path.parent) == ["config.yaml"]


def test_a_key_that_follows_another_still_follows_it_in_a_run_repeated_with_another_value(
    tmp_path: Path,
):
    config = settings(
        tmp_path,
        **{f"{A}.ppo_max_token_len_per_gpu": 4096, f"{R}.log_prob_max_token_len_per_gpu": 3000},
    )
    frozen = yaml.safe_load(freeze(config, tmp_path).read_text())
    assert load_frozen(tmp_path) == config
    frozen["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"] = 2048
    again = load(frozen)  # as the last line of a finished run advises
    assert again.actor_rollout_ref.rollout.max_num_batched_tokens == 2048
    assert again.actor_rollout_ref.ref.log_prob_max_token_len_per_gpu == 2048
    assert again.critic.ppo_max_token_len_per_gpu == 4096
    assert again.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 3000, "set by itself"


def test_old_files_get_the_defaults_of_newer_keys(tmp_path: Path):
    config = settings(tmp_path)
    path = freeze(config, tmp_path)
    old = yaml.safe_load(path.read_text())
    del old["trainer"]["plot_interval"], old["actor_rollout_ref"]["actor"]["clip_ratio_high"]
    path.write_text(yaml.safe_dump(old))
    assert load_frozen(tmp_path) == config


def test_before_training_began_anything_may_change(tmp_path: Path):
    freeze(settings(tmp_path), tmp_path)
    freeze(settings(tmp_path, **{"data.train_batch_size": 16}), tmp_path)
    assert load_frozen(tmp_path).data.train_batch_size == 16


@pytest.mark.parametrize(
    ("folder", "files", "message"),
    [
        ("run", ["latest_checkpointed_iteration.txt"], "checkpoints of verl"),
        ("run", ["global_step_20/actor/model.pt"], "checkpoints of verl"),
        ("run", ["latest", "global_step7/mp_rank_00_model_states.pt"], "checkpoints of DeepSpeed"),
        ("run", ["checkpoint-500/trainer_state.json"], "checkpoints of transformers"),
        ("run/checkpoints", ["step_4/manifest.json"], "Type trainer.default_local_dir=.*/run "),
        ("run/checkpoints/step_4", ["manifest.json"], "Type trainer.default_local_dir=.*/run "),
    ],
)
def test_a_run_does_not_begin_among_checkpoints_that_it_would_not_resume(
    tmp_path: Path, folder: str, files: list[str], message: str
):
    run = tmp_path / folder
    for file in files:
        (run / file).parent.mkdir(parents=True, exist_ok=True)
        (run / file).write_text("x")
    with pytest.raises(UserError, match=message):
        freeze(settings(run), run)
    assert not (run / "config.yaml").exists()


@pytest.mark.parametrize("sign", ["metrics.jsonl", "step_3", "checkpoints/step_3"])
def test_a_started_run_names_each_difference_with_both_values(tmp_path: Path, sign: str):
    freeze(settings(tmp_path), tmp_path)
    mark = tmp_path / sign
    if mark.suffix:
        mark.write_text("{}\n")
    else:
        mark.mkdir(parents=True)
    with pytest.raises(UserError) as error:
        freeze(settings(tmp_path, **{"data.train_batch_size": 16, "trainer.seed": 4}), tmp_path)
    text = str(error.value)
    assert "data.train_batch_size=16, but the run in" in text and "was started with 64" in text
    assert "trainer.seed=4" in text and "trainer.experiment_name" in text
    assert load_frozen(tmp_path).trainer.seed == 1


def test_a_started_run_may_go_on_longer_and_log_elsewhere(tmp_path: Path):
    freeze(settings(tmp_path), tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    changes = {
        "trainer.total_training_steps": 9,
        "trainer.logger": ["console"],
        "trainer.checkpoint.save_freq": 2,
    }
    freeze(settings(tmp_path, **changes), tmp_path)
    assert load_frozen(tmp_path).trainer.total_training_steps == 9


def test_paths_that_exist_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "t.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    config = settings(
        tmp_path / "run", **{"data.task": None, "data.train_files": ["t.jsonl", "s3://b/x.jsonl"]}
    )
    frozen = load_frozen(freeze(config, tmp_path / "run").parent)
    assert frozen.data.train_files == [str(tmp_path / "t.jsonl"), "s3://b/x.jsonl"]
    assert frozen.actor_rollout_ref.model.path == "builtin:tiny"


def test_a_folder_that_cannot_be_written(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"can't be written .*trainer.default_local_dir"):
        freeze(settings(tmp_path / "file" / "run"), tmp_path / "file" / "run")


def test_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = freeze(settings(tmp_path), tmp_path)
    before = path.read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainer.config.frozen.os.fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        freeze(settings(tmp_path, **{"trainer.seed": 9}), tmp_path)
    assert path.read_text() == before and os.listdir(tmp_path) == ["config.yaml"]


@pytest.mark.parametrize(
    ("text", "message"), [(None, "can't be read"), ("a: [", "no YAML"), ("3", "no settings")]
)
def test_unreadable_frozen_settings(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_frozen(tmp_path)


def test_a_number_typed_into_a_frozen_file_is_a_number(tmp_path: Path):
    path = freeze(settings(tmp_path), tmp_path)
    path.write_text(path.read_text().replace("lr: 1.0e-06", "lr: 3e-6"))
    assert load_frozen(tmp_path).actor_rollout_ref.actor.optim.lr == 3e-6


def test_written_values_can_be_typed_again():
    assert format_value([None, True, 1.5, "a"]) == "[null,true,1.5,a]"
