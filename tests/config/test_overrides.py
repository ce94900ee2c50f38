"""The command line, before Hydra sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.checks.problems import SettingsError
from trainer.config.overrides import LAUNCHER, check_overrides


def complaints(*argv: str) -> str:
    return str(SettingsError(check_overrides(argv).problems))


def test_all_unknown_keys_are_named_at_once_with_and_without_plus():
    text = complaints(
        "data.trian_batch_size=4", "+trainer.ckeckpoint.save_freq=2", "++zzz=1", "data.seed=3"
    )
    assert "3 problems" in text
    assert "unknown key data.trian_batch_size; did you mean data.train_batch_size?" in text
    assert (
        "unknown key trainer.ckeckpoint.save_freq; did you mean trainer.checkpoint.save_freq?"
        in text
    )
    assert "unknown key zzz" in text


def test_verl_keys_without_support_give_their_reason():
    assert "own filters" in complaints("algorithm.filter_groups.filter_kwargs.a=1")
    assert "deprecated; use" in complaints("+actor_rollout_ref.actor.ppo_micro_batch_size=4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("junk", "'junk' is no override; write KEY=VALUE"),
        ("data.seed=[1", "'data.seed=[1' can't be read"),
        ("~data.seed", "set data.seed=null"),
        ("data=arithmetc", "there is no such choice; did you mean 'arithmetic'?"),
    ],
)
def test_unreadable_overrides(text: str, message: str):
    assert message in complaints(text)


def test_other_spellings_are_renamed_and_a_plus_on_a_known_key_is_taken():
    argv = check_overrides(
        [
            "trainer.save_freq=3",
            "actor_rollout.backend=hybrid",
            "+data.seed=4",
            "trainer.balance_batch=true",
        ]
    ).argv
    assert argv[-3:] == [
        "trainer.checkpoint.save_freq=3",
        "actor_rollout_ref.hybrid_engine=true",
        "data.seed=4",
    ]


def test_sweeps_keep_lists_and_go_to_slurm_unless_told_otherwise():
    key = "actor_rollout_ref.actor.bucket_boundaries"
    line = check_overrides(["-m", f"{key}=[64,256],[64,256,1024]", "trainer.save_freq=1,2"])
    assert line.multirun and LAUNCHER in line.argv and "-m" in line.argv
    assert line.argv[-2:] == [f"{key}=[64,256],[64,256,1024]", "trainer.checkpoint.save_freq=1,2"]
    assert LAUNCHER not in check_overrides(["-m", "hydra/launcher=local", "data.seed=1,2"]).argv


@pytest.mark.parametrize(
    "word",
    [
        "hydra/launcher=submitit_slurm",
        "+hydra/launcher='submitit_local'",
        "hydra/launcher=basic",
        "hydra/launcher=slurm,submitit_slurm",
        "hydra.launcher._target_=hydra_plugins.hydra_submitit_launcher.SlurmLauncher",
    ],
)
def test_another_launcher_is_one_message_that_names_ours(word: str):
    (problem,) = check_overrides(["-m", word, "data.seed=1,2"]).problems
    assert problem.startswith(word) and "type hydra/launcher=slurm, or" in problem


def test_flags_may_stand_between_overrides():
    assert check_overrides(["data.seed=1", "-m", "trainer.seed=1,2"]).argv[-2:] == [
        "data.seed=1",
        "trainer.seed=1,2",
    ]


def test_a_relative_config_path_is_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "runs a").mkdir()
    monkeypatch.chdir(tmp_path)
    line = check_overrides(["--config-path", "runs a", "--config-name", "config"])
    assert line.argv[:2] == ["--config-path", str(tmp_path / "runs a")]


def test_open_groups_take_any_key():
    assert (
        check_overrides(["data.apply_chat_template_kwargs.enable_thinking=false"])
        .argv[-1]
        .startswith("++data.")
    )


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        (["reward.rules.openai/gsm8k=maths"], "openai/gsm8k:maths"),
        (["++reward.rules.my.org/v1.5-x=search_em"], "my.org/v1.5-x:search_em"),
        (["reward.rules.aime*=maths", "reward.rules.b=exact_match"], "aime*:maths,b:exact_match"),
        (["reward.rules={a/b:maths}", "reward.rules.a/b=exact_match"], "a/b:exact_match"),
    ],
)
def test_rules_of_sources_with_slashes_and_dots_are_one_group_for_hydra(
    argv: list[str], given: str
):
    line = check_overrides(argv)
    assert line.problems == []
    assert line.argv[-1] == f"++reward.rules={{{given}}}"


def test_a_rule_that_does_not_exist_and_a_source_that_cannot_be_typed_are_told():
    text = complaints("reward.rules.a/b=exct_match", "reward.rules.a,b=maths", "reward.rules={c:x}")
    assert "reward.rules.a/b=exct_match: there is no such rule; did you mean 'exact_match'?" in text
    assert "reward.rules.a,b=maths: a data source of that name can't be typed" in text
    assert "reward.rules.c=x: there is no such rule (maths, multiple_choice" in text


def test_a_sweep_over_rules_is_left_to_hydra():
    sweep = "reward.rules={a:maths},{a:exact_match}"
    assert check_overrides(["-m", sweep]).argv[-1] == f"++{sweep}"


def test_keys_of_the_cluster_are_left_to_hydra():
    words = ["cluster=dev", "cluster.partition=x", "hydra.launcher.timeout_min=5"]
    assert check_overrides(["-m", *words]).argv[-1].startswith("hydra.")
    for only_looks in (
        check_overrides([*words, "--cfg", "job"]),
        check_overrides(words, starts_run=False),
    ):
        assert only_looks.argv[-3:] == words


@pytest.mark.parametrize(
    "word", ["cluster=dev", "container.image=x.sif", "hydra/launcher=slurm", "hydra.sweep.dir=x"]
)
def test_what_only_jobs_read_is_no_setting_of_a_run_here(word: str):
    assert f"{word}: read by jobs only; type python -m trainer -m ..." in complaints(
        "data.seed=1", word
    )
    check_overrides(["hydra.run.dir=x", "data=arithmetic"])
