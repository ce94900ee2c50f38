"""``python -m trainer`` up to the start of the ranks."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.config.helpers import REPO, minimal_settings, python_m
from trainer.__main__ import main
from trainer.base.errors import UserError
from trainer.config import freeze, load
from trainer.config.cli import help_text
from trainer.config.keys.conf_tree import conf_dir, config_groups
from trainer.config.keys.tree import is_known

DEMO = ("data=arithmetic", "model=tiny", "algorithm=grpo")
RANK = """
import json, sys
from trainer.config import load_frozen
def main(run_dir):
    config = load_frozen(run_dir)
    (run_dir / "ran").write_text(str(config.data.train_batch_size))
    return config.trainer.seed - 1
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "tiny_rank.py").write_text(RANK)
    return tmp_path


def trainer(place: Path, *argv: str, repo: Path = REPO, **env: str):
    return python_m(
        "trainer", *argv, cwd=place, repo=repo, PLIMSOLL_WORKER_MODULE="tiny_rank", **env
    )


@pytest.mark.parametrize("argv", [("--help",), ("--cfg", "job", "--resolve")])
def test_help_and_settings_answer_at_once_without_torch(tmp_path: Path, argv: tuple[str, ...]):
    imports = python_m("trainer", *argv, cwd=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert not re.search(r"\| +(torch|transformers|deepspeed|submitit)$", imports.stderr, re.M)
    before = os.times()
    assert python_m("trainer", *argv, cwd=tmp_path).returncode == 0
    after = os.times()
    # Processor time, which other load on the machine leaves alone; 0.8 s where it was measured.
    assert (
        after.children_user + after.children_system - before.children_user - before.children_system
        < 2.5
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "words", [("trainer",), ("trainer.plan",), ("jobs",), ("jobs", "watch"), ("trainer.export",)]
)
def test_help_fits_a_terminal(tmp_path: Path, words: tuple[str, ...]):
    done = python_m(*words, "--help", cwd=tmp_path, COLUMNS="80")
    assert done.returncode == 0 and len(done.stdout.splitlines()) > 5
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


def test_help_names_keys_that_exist():
    typed = re.findall(r"(?:data|actor_rollout_ref|trainer|algorithm)\.[a-z_.]+[a-z_]", help_text())
    assert [key for key in typed if not is_known(key) and key != "trainer.plan"] == []


def test_printed_settings_are_whole(tmp_path: Path):
    shown = yaml.safe_load(
        python_m("trainer", "--cfg", "job", "--resolve", *DEMO, cwd=tmp_path).stdout
    )
    assert shown["critic"]["ppo_max_token_len_per_gpu"] == 32768
    assert load(shown).data.task == "arithmetic"


def test_a_run_leaves_its_folder_and_nothing_else_and_ends_as_its_rank(place: Path):
    done = trainer(
        place, *DEMO, "data.train_batch_size=4", "trainer.default_local_dir=r", "trainer.seed=86"
    )
    assert (done.returncode, done.stderr) == (85, ""), "the exit code is the rank's"
    assert (place / "r" / "ran").read_text() == "4"
    assert sorted(p.name for p in place.iterdir() if p.name != "__pycache__") == [
        "r",
        "tiny_rank.py",
    ]


def test_a_frozen_run_repeats(place: Path):
    freeze(load(minimal_settings(**{"data.train_batch_size": 4})), place / "r")
    frozen = ("--config-path", str(place / "r"), "--config-name", "config")
    again = trainer(place, *frozen, f"trainer.default_local_dir={place}/s")
    assert (again.returncode, again.stderr) == (0, "")
    first, second = (yaml.safe_load((place / name / "config.yaml").read_text()) for name in "rs")
    assert (place / "s" / "ran").read_text() == "4"
    assert first["trainer"].pop("default_local_dir") != second["trainer"].pop("default_local_dir")
    assert first == second
    assert "unknown key data.zzz" in trainer(place, *frozen, "data.zzz=1").stderr


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*DEMO, "data.trian_files=x", "+foo=1"), "2 problems in the settings"),
        ((*DEMO, "data.train_batch_size=x"), "expected a whole number"),
        ((*DEMO, "actor_rollout_ref.rollout.n=1"), "grpo compares"),
        (
            (*DEMO, "trainer.nnodes=2"),
            "trainer.nnodes=2, but python -m trainer runs on this machine alone",
        ),
        (("--config-name", "nothing"), "nothing"),
        (("cluster=dev", "cluster.zzz=1"), "cluster.zzz"),
        ((*DEMO, "trainer.default_local_dir=/proc/x/run"), "can't be written"),
        (
            (*DEMO, "-m", "hydra.launcher.setup=${trainer}"),
            "DictConfig is not a ListConfig, list or tuple, in hydra.launcher.setup: refer to",
        ),
        (
            (*DEMO, "-m", "hydra.launcher.additional_parameters=${trainer.seed}"),
            "Cannot assign int to Dict[str, Any], in hydra.launcher.additional_parameters: refer",
        ),
        (
            (*DEMO, "-m", "hydra.launcher.comment=${no.key}", "hydra.launcher.srun_args=${data}"),
            "in hydra.launcher.comment or hydra.launcher.srun_args: refer",
        ),
        ((), "nothing to train on"),
    ],
)
def test_wrong_input_is_one_message_and_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    for full in (False, True):
        if full:
            monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
        monkeypatch.setattr("sys.argv", ["trainer", *argv])
        assert main() == 2
        shown = capsys.readouterr().err
        assert message in shown and ("Traceback" in shown) == full
        if not full:
            assert (
                shown.startswith("Error: ")
                and shown.count("Error") == 1
                and "HYDRA_FULL_ERROR" not in shown
            )
    assert os.listdir(tmp_path) == []


def test_the_process_ends_with_code_2(place: Path):
    done = trainer(place, *DEMO, "data.zzz=1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: unknown key data.zzz") and done.stderr.count("\n") == 1


PRESETS = sorted(
    (g, name) for g, names in config_groups([conf_dir()]).items() if "/" not in g for name in names
)


@pytest.mark.parametrize(("group", "name"), PRESETS)
def test_every_preset_composes_into_a_valid_run(group: str, name: str):
    from hydra import compose, initialize_config_dir

    # What a preset leaves to the user; the rollout of presets that change only one section.
    given = ["actor_rollout_ref.model.path=x"] if group != "model" else []
    given += (
        ["data.train_files=a", "data.val_files=b"]
        if (group, name) != ("data", "arithmetic")
        else []
    )
    given += ["algorithm=grpo"] if group not in ("algorithm", "experiment") else []
    if name.startswith("demo"):
        given = []
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        load(compose("config", [f"{group}={name}", *given]))


def test_settings_are_found_in_an_installed_package(place: Path):
    site = place / "site"
    shutil.copytree(
        REPO / "trainer", site / "trainer", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(REPO / "conf", site / "trainer" / "conf")
    done = trainer(place, "--cfg", "job", "data=arithmetic", repo=site)
    assert done.returncode == 0 and "task: arithmetic" in done.stdout
    assert trainer(place, "data.sed=1", repo=site).returncode == 2


def test_a_user_error_lists_no_settings_twice():
    with pytest.raises(UserError) as error:
        load({"data": {"train_batch_size": "x"}})
    assert str(error.value).count("expected") == 1
