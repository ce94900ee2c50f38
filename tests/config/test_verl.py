"""verl's settings: what each becomes here, on the command line, in a file and in a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config import verl_scripts
from tests.config.helpers import REPO, minimal_settings, problems, python_m
from trainer.config import load, reference
from trainer.config.keys.tree import is_known, known_keys
from trainer.config.overrides import check_overrides
from trainer.config.verl.accepted import ACCEPTED
from trainer.config.verl.names import ALIASES, GROUPS, VALUES, our_name
from trainer.config.verl.refused import REFUSED, REFUSED_VALUES, refused_reason
from trainer.config.verl.script import read_script
from trainer.config.verl.translate import translate, translate_tree

ACTOR = "actor_rollout_ref.actor"


def test_tables_speak_of_keys_that_exist() -> None:
    assert [key for key in ALIASES.values() if key not in known_keys() | REFUSED] == []
    assert [key for key in (*ALIASES, *REFUSED) if is_known(key) and key not in _BOTH] == []
    assert [key for key, _ in (*VALUES, *REFUSED_VALUES) if key not in known_keys()] == []
    assert [key for key in GROUPS if is_known(key)] == []


_BOTH = {
    "critic",
    "reward",
    "actor_rollout_ref.actor.policy_loss",
    "actor_rollout_ref.rollout.agent",
}
"""Groups of ours in which verl has keys that we don't."""


def test_settings_that_change_nothing_have_a_reason_for_other_values() -> None:
    bounded = [key for key, rule in ACCEPTED.items() if rule.values is not None]
    unexplained = [
        key
        for key in bounded
        if not refused_reason(key) and not any(key == known for known, _ in REFUSED_VALUES)
    ]
    assert [key for key in unexplained if key != "engine"] == []


@pytest.mark.parametrize(
    ("typed", "outcome", "here"),
    [
        ("trainer.save_freq=20", "taken", "trainer.checkpoint.save_freq=20"),
        ("optim.lr=1e-4", "taken", f"{ACTOR}.optim.lr=1e-4"),
        (f"{ACTOR}.fsdp_config.param_offload=True", "taken", f"{ACTOR}.param_offload=True"),
        ("algorithm.kl_penalty=kl", "taken", "algorithm.kl_penalty=k1"),
        ("data.train_max_samples=-1", "taken", "data.train_max_samples=null"),
        ('trainer.logger=["console","file"]', "taken", "trainer.logger=[console]"),
        (f"{ACTOR}.strategy=fsdp2", "accepted", f"{ACTOR}.strategy=fsdp2"),
        (f"{ACTOR}.strategy=deepspeed", "taken", f"{ACTOR}.strategy=deepspeed"),
        (f"{ACTOR}.strategy=megatron", "refused", f"{ACTOR}.strategy=megatron"),
        ("ray_kwargs.ray_init.num_cpus=4", "accepted", "ray_kwargs.ray_init.num_cpus=4"),
        ("actor_rollout_ref.ref.fsdp_config.param_offload=True", "accepted", None),
        ("actor_rollout_ref.ref.model.path=x", "refused", None),
        ("actor_rollout_ref.rollout.mode=async", "accepted", None),
        ("distillation.enabled=False", "accepted", None),
        ("distillation.enabled=True", "refused", None),
        ("reward.reward_manager.name=dapo", "refused", None),
        ("reward_model.reward_manager=dapo", "accepted", None),
        ("reward_model.overlong_buffer.log=False", "accepted", None),
        (
            "reward_model.reward_kwargs.overlong_buffer_cfg.len=9",
            "taken",
            "reward_model.overlong_buffer.len=9",
        ),
        ("nobody.knows=1", "unknown", None),
    ],
)
def test_each_setting_is_taken_accepted_refused_or_unknown(
    typed: str, outcome: str, here: str | None
) -> None:
    key, _, value = typed.partition("=")
    found = translate(key, value)
    assert found.outcome == outcome
    assert here in (None, f"{found.key}={found.value}")
    assert found.reason or outcome == "taken"


def test_no_hint_points_to_an_unrelated_key() -> None:
    assert "did you mean" not in translate("distillation.enabld", "1").reason
    assert "did you mean" not in translate("skip.rollout.enable", "1").reason
    assert "mean trainer.checkpoint.save_freq?" in translate("save_freq", "1").reason
    assert f"mean {ACTOR}.optim.lr?" in translate("actor.optim.lr", "1").reason


def test_what_changes_nothing_is_named_in_one_line_and_left_out() -> None:
    line = check_overrides(
        ["ray_kwargs.ray_init.num_cpus=4", "data.return_raw_chat=True", "data.seed=3"]
    )
    assert line.problems == [] and line.argv[-1] == "data.seed=3"
    assert not any("ray_init" in word for word in line.argv)
    (note,) = line.notes
    assert note.startswith("2 of verl's settings change nothing here: data.return_raw_chat, ")


def test_of_a_key_given_twice_the_last_counts_and_is_told() -> None:
    line = check_overrides(["trainer.save_freq=3", "data.seed=1", "trainer.checkpoint.save_freq=4"])
    assert line.problems == [] and line.argv[-2:] == [
        "data.seed=1",
        "trainer.checkpoint.save_freq=4",
    ]
    assert line.notes == [
        "trainer.checkpoint.save_freq is given twice: the last one, 4, counts, not 3"
    ]
    assert check_overrides(["data.seed=1", "data.seed=1"]).notes == []


def test_all_mistakes_of_a_command_line_come_in_one_round(tmp_path: Path) -> None:
    done = python_m(
        "trainer",
        "distillation.enabled=True",
        "data.sede=3",
        "data.truncation=centre",
        f"{ACTOR}.zero_stage=7",
        "data=arithmetic",
        "actor_rollout_ref.rollout.n=1",
        "actor_rollout_ref.model.path=builtin:tiny",
        cwd=tmp_path,
    )
    assert done.returncode == 2 and "5 problems" in done.stderr, done.stderr
    for part in (
        "distillation.enabled=True is not supported",
        "unknown key data.sede; did you mean data.seed?",
        "data.truncation=centre: expected one of",
        f"{ACTOR}.zero_stage=7: expected",
        "grpo compares responses of one prompt",
    ):
        assert part in done.stderr


def test_a_count_of_sequences_means_static_batches_unless_tokens_are_asked_for() -> None:
    key = "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu"
    roles = load(minimal_settings(**{key: 4})).actor_rollout_ref
    assert (roles.actor.use_dynamic_bsz, roles.ref.log_prob_use_dynamic_bsz) == (False, False)
    both = {key: 4, "actor_rollout_ref__actor__use_dynamic_bsz": True}
    assert load(minimal_settings(**both)).actor_rollout_ref.actor.use_dynamic_bsz
    assert load(minimal_settings()).actor_rollout_ref.actor.use_dynamic_bsz


def test_weights_in_host_memory_imply_the_stage_that_keeps_them_there() -> None:
    key = "actor_rollout_ref__actor__fsdp_config__param_offload"
    assert load(minimal_settings(**{key: True})).actor_rollout_ref.actor.zero_stage == 3
    assert load(minimal_settings()).actor_rollout_ref.actor.zero_stage == 1
    stage = {"actor_rollout_ref__actor__zero_stage": 2}
    assert "needs actor_rollout_ref.actor.zero_stage=3 (now 2)" in "".join(
        problems(minimal_settings(**{key: True}, **stage))
    )


def test_a_file_of_settings_is_translated_like_a_command_line() -> None:
    tree = {
        "trainer": {"save_freq": 3, "balance_batch": True, "logger": ["console", "file"]},
        "ray_kwargs": {"ray_init": {"num_cpus": 4}},
        "data": {"sede": 1, "train_max_samples": -1},
    }
    changed, wrong = translate_tree(tree)
    assert wrong == []
    assert tree == {
        "trainer": {"checkpoint": {"save_freq": 3}, "logger": ["console"]},
        "data": {"train_max_samples": None},
    }
    assert {typed: found.outcome for typed, found in changed.items()} == {
        "trainer.save_freq=3": "taken",
        "trainer.balance_batch=true": "accepted",
        "trainer.logger=[console,file]": "taken",
        "ray_kwargs.ray_init.num_cpus=4": "accepted",
        "data.sede=1": "unknown",
        "data.train_max_samples=-1": "taken",
    }
    both = {"trainer": {"save_freq": 3, "checkpoint": {"save_freq": 4}}}
    assert "another name of trainer.checkpoint.save_freq: set one" in translate_tree(both)[1][0]


def test_every_setting_with_another_name_is_found_by_it() -> None:
    for alias, key in ALIASES.items():
        assert our_name(alias) == our_name(key)


SCRIPT = r"""
#!/usr/bin/env bash
set -x
DEVICE=${DEVICE:-$(python3 -c 'import torch' && echo gpu || echo cpu)}
MODEL_PATH=${MODEL_PATH:-org/model}   # a comment with trainer.seed=9
TRAIN=${TRAIN:-$HOME/data/train.parquet}
GPUS=${GPUS:-8}
LENGTH=${LENGTH:-1024}
case "$DEVICE" in
    cpu)
        GPUS=16
        ;;
esac
DATA=(
    algorithm.adv_estimator=grpo
    data.train_files="$TRAIN"
    data.max_prompt_length=$LENGTH
    data.max_response_length=$((LENGTH * 2 + 24))
    data.truncation='error')
extra=()
extra+=("trainer.total_epochs=${EPOCHS:-15}")
python3 -m verl.trainer.main_ppo "${DATA[@]}" \
    actor_rollout_ref.model.path="$MODEL_PATH" trainer.logger='["console","wandb"]' \
    trainer.n_gpus_per_node=$GPUS \
    "${extra[@]}" "$@"
"""


def test_a_script_is_read_with_its_variables_defaults_and_sums() -> None:
    script = read_script(SCRIPT)
    assert script.program == "main_ppo" and not script.is_sft
    assert script.settings == [
        "algorithm.adv_estimator=grpo",
        "data.train_files=$HOME/data/train.parquet",
        "data.max_prompt_length=1024",
        "data.max_response_length=2072",
        "data.truncation=error",
        "trainer.total_epochs=15",
        "actor_rollout_ref.model.path=org/model",
        'trainer.logger=["console","wandb"]',
        "trainer.n_gpus_per_node=8",
    ]


def test_the_command_prints_a_table_and_a_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(SCRIPT + "python3 -m verl.trainer.main_ppo engine=fsdp optim.lr=1e-6\n")
    done = python_m("trainer.config.verl", str(path), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "optim.lr=1e-6  ->  actor_rollout_ref.actor.optim.lr=1e-6" in done.stdout
    assert "python -m trainer \\\n    algorithm.adv_estimator=grpo \\\n" in done.stdout
    assert "caller knows: set data.train_files." in done.stdout
    path.write_text("python3 -m verl.trainer.sft_trainer critic.nothing=1 optim.lr=1\n")
    done = python_m("trainer.config.verl", str(path), cwd=tmp_path)
    assert done.returncode == 2 and "trainer.mode=sft" in done.stdout


@pytest.mark.parametrize("text", ["", "echo hello\n", "\0\n", "a='\n", "x=(((\n" * 50])
def test_what_is_no_script_for_verl_is_one_message(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(text)
    done = python_m("trainer.config.verl", str(path), cwd=tmp_path)
    assert done.returncode == 2 and "holds no settings" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_page_for_those_who_come_from_verl_is_in_step() -> None:
    page = (REPO / "docs/coming-from.md").read_text()
    assert page == reference.coming_from(page), "run python -m trainer.config.reference"


def test_verls_examples_compose_or_say_why_not(shared: Path) -> None:
    table = verl_scripts.table(shared / "data" / "verl_overrides.jsonl")
    assert table in verl_scripts.PAGE.read_text(), "run python -m tests.config.verl_scripts FILE"
    assert "unknown key" not in table


def test_a_file_whose_settings_change_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [config, _self_]\nray_kwargs: {ray_init: {num_cpus: 4}}\n"
    )
    words = ("--config-path", str(tmp_path), "--config-name", "mine", "experiment=demo_grpo")
    done = python_m("trainer", *words, "trainer.nnodes=2", cwd=tmp_path)
    assert "1 of verl's settings change nothing here: ray_init.num_cpus" in done.stderr
    assert done.returncode == 2 and "trainer.nnodes=2" in done.stderr  # it goes on to the checks
