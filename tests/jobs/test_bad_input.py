"""Wrong input is one message that names the key and the way out, and reaches no sbatch."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jobs.hydra_entry import launch_on_slurm
from jobs.slurm import MOST_TASKS, Slurm, seconds, tasks_of
from jobs.submit import option_checks
from jobs.submit.launch import jobs_of
from jobs.submit.options import LocalOptions, SlurmOptions, slurm_options
from jobs.submit.preflight import folder_problems, save_seconds
from tests.jobs.conftest import point, put
from trainer.base.errors import UserError
from trainer.base.model_shape import ModelShape
from trainer.plan.memory import checkpoint_bytes


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (
            {"trainer__n_gpus_per_node": 16, "data__train_batch_size": 64},
            {},
            "have 8 GPUs; use at most that",
        ),
        ({"cluster": {"partition": "lowest"}}, {}, "did you mean 'low'"),
        (
            {},
            {"partition": "nowhere"},
            "partition 'nowhere' is not known to Slurm, which has low, high.",
        ),
        ({}, {"timout_min": 5}, "did you mean 'timeout_min'"),
        ({}, {"timeout_min": 1, "signal_delay_s": 60}, "leaves nothing of timeout_min=1"),
        ({}, {"timeout_min": 99, "signal_delay_s": 60}, "above the partition's MaxTime of 60 min"),
        ({}, {"resubmit": "fail"}, "did you mean 'failed'"),
        ({}, {"gpus_per_node": 2}, "contradicts trainer.n_gpus_per_node=1"),
        ({}, {"nodes": 2}, "contradicts trainer.nnodes=1"),
        (
            {
                "actor_rollout_ref__rollout__name": "vllm_server",
                "actor_rollout_ref__rollout__nnodes": 2,
            },
            {"nodes": 1},
            "contradicts trainer.nnodes + actor_rollout_ref.rollout.nnodes=3",
        ),
        (
            {
                "actor_rollout_ref__rollout__name": "vllm_server",
                "actor_rollout_ref__rollout__nnodes": 32,
            },
            {},
            "trainer.nnodes + actor_rollout_ref.rollout.nnodes=33, but a job of partition "
            "'default' gets at most 32",
        ),
        (
            {"actor_rollout_ref__rollout__nnodes": 2},
            {},
            "rollout.nnodes=2 is for an engine with processes of its own",
        ),
        (
            {"container": {"runtime": "apptainer", "image": "/no.sif"}},
            {},
            "/no.sif does not exist; build it with",
        ),
        ({"cluster": {"local_folders": ["/tmp"]}}, {}, "shared file system"),
        ({"trainer__total_training_steps": -4}, {}, "total_training_steps=-4"),
        (
            {"trainer__n_gpus_per_node": 3, "data__train_batch_size": 64},
            {},
            "don't divide over dp=3 ranks (42.67 each); nearest valid: ppo_mini_batch_size=63 or "
            "66",
        ),
        (
            {"actor_rollout_ref__actor__ulysses_sequence_parallel_size": 3},
            {},
            "nearest valid: world=3",
        ),
        (
            {"actor_rollout_ref__model__path": "./no/such/model"},
            {},
            "model.path=./no/such/model: there is no /",
        ),
        (
            {"data__task": None, "data__train_files": ["/no/*.jsonl"]},
            {},
            "data.train_files=/no/*.jsonl: there is no /no",
        ),
        (
            {},
            {"max_array_size": 0},
            "hydra.launcher.max_array_size=0 must be a whole number of at least 1",
        ),
        (
            {},
            {"array_parallelism": 0.5},
            "hydra.launcher.array_parallelism=0.5 must be a whole number",
        ),
        (
            {},
            {"gpus_per_task": 4},
            "hydra.launcher.gpus_per_task=4, but each task is a rank, which has one GPU",
        ),
        (
            {},
            {"cpus_per_task": 0},
            "hydra.launcher.cpus_per_task=0 must be a whole number of at least 1",
        ),
        ({}, {"mem_gb": -1}, "hydra.launcher.mem_gb=-1 must be a number above 0"),
        ({}, {"timeout_min": "1 hour"}, "hydra.launcher.timeout_min=1 hour must be a whole number"),
    ],
)
def test_message(
    settings: dict[str, Any],
    options: dict[str, Any],
    message: str,
    fake: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MAX_TIME", "01:00:00")
    good = point(0)
    bad = point(1, **{"trainer__seed": 7, **settings})
    with pytest.raises(UserError) as caught:
        launch_on_slurm(
            [good, bad], {"ledger": str(tmp_path / "ledger"), **options}, tmp_path / "sweep"
        )
    assert message in str(caught.value)
    assert not list(fake.glob("script*")) and not (tmp_path / "sweep").exists()


def test_the_problems_of_all_jobs_are_one_message(fake: Path, tmp_path: Path) -> None:
    points = [point(0), point(1, trainer__nnodes=0), point(2, data__train_batch_size=0)]
    with pytest.raises(UserError) as caught:
        launch_on_slurm(points, {"ledger": str(tmp_path / "l")}, tmp_path / "sweep")
    assert (
        "job 1 (" in str(caught.value)
        and "job 2 (" in str(caught.value)
        and "job 0" not in str(caught.value)
    )


def test_two_jobs_cannot_share_a_run_folder(fake: Path, tmp_path: Path) -> None:
    same = f"trainer.default_local_dir={tmp_path}/same"
    points = [
        point(n, same, trainer__default_local_dir=f"{tmp_path}/same", trainer__seed=n)
        for n in range(2)
    ]
    with pytest.raises(UserError, match="jobs 0 and 1 share the run folder"):
        launch_on_slurm(points, {"ledger": str(tmp_path / "l")}, tmp_path / "sweep")


def test_without_slurm_the_local_launcher_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="hydra/launcher=local"):
        launch_on_slurm([point(0)], {}, tmp_path / "sweep")


def test_sbatchs_message_is_shown_and_the_ledger_has_the_plan(fake: Path, tmp_path: Path) -> None:
    (fake / "refuse").write_text("Invalid account or account/partition combination")
    with pytest.raises(UserError, match="Invalid account"):
        launch_on_slurm([point(0)], {"ledger": str(tmp_path / "l")}, tmp_path / "sweep")
    assert '"phase":"planned"' in (tmp_path / "l").read_text()
    assert '"phase":"submitted"' not in (tmp_path / "l").read_text()


def test_an_image_that_was_changed(fake: Path, tmp_path: Path) -> None:
    image = tmp_path / "x.sif"
    image.write_bytes(b"image")
    container = {"runtime": "apptainer", "image": str(image), "digest": "sha256:0123"}
    with pytest.raises(UserError, match="was changed"):
        launch_on_slurm(
            [point(0, container=container)], {"ledger": str(tmp_path / "l")}, tmp_path / "sweep"
        )


def test_arrays_are_cut_at_max_array_size(
    fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAX_ARRAY", "2")
    points = [point(n, trainer__seed=n) for n in range(5)]
    assert launch_on_slurm(points, {"ledger": str(tmp_path / "l")}, tmp_path / "sweep") == 0
    arrays = [
        line
        for n in range(3)
        for line in (fake / f"script{n}").read_text().splitlines()
        if "--array" in line
    ]
    assert arrays == ["#SBATCH --array=0-1%2", "#SBATCH --array=0-1%2", "#SBATCH --array=0-0%1"]


SEVEN_B = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("cluster", "options", "message"),
    [
        (
            {},
            {"signal_delay_s": 60},
            r"predicted to take 10\d s.*signal_delay_s=60; set it to 19\d or more",
        ),
        ({}, {}, r"predicted to take 10\d s.*its partition's GraceTime of 10 s; use a partition"),
        (
            {"grace_s": 30},
            {},
            r"predicted to take 10\d s.*cluster\.grace_s=30; "
            "use a partition with a longer GraceTime",
        ),
    ],
)
def test_a_checkpoint_longer_than_the_warning(
    cluster: dict[str, Any], options: dict[str, Any], message: str, fake: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    big = point(0, cluster=cluster, actor_rollout_ref__model__path=str(tmp_path))
    with pytest.raises(UserError, match=message):
        launch_on_slurm([big], {"ledger": str(tmp_path / "l"), **options}, tmp_path / "sweep")
    assert not list(fake.glob("script*"))


def test_the_size_of_a_checkpoint_has_one_formula(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEVEN_B))
    (job,) = jobs_of([point(0, actor_rollout_ref__model__path=str(tmp_path))], tmp_path)
    size = checkpoint_bytes(ModelShape.from_folder(tmp_path), precision="bf16", zero_stage=1)
    assert save_seconds(job.checked, job.shape) == pytest.approx(
        size / 1e9 + 1
    )  # at 1 GB/s; a second to commit


def test_run_folder_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "not a folder that you may write to" in folder_problems(tmp_path / "file/run", ())[0]


def test_a_slurm_that_hangs_is_an_error_after_a_time_limit(fake: Path, tmp_path: Path) -> None:
    put(tmp_path / "bin", "squeue", "exec sleep 60")
    with pytest.raises(UserError, match="'squeue' didn't answer within 0 s"):
        Slurm(timeout_s=0.2).queue(["7_0"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30", 30),
        ("10:00", 600),
        ("1:00:00", 3600),
        ("2-00:00:00", 172800),
        ("1-12", 129600),
        ("UNLIMITED", None),
    ],
)
def test_slurms_times(text: str, value: int | None) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize(
    ("name", "values", "accepted"),
    [
        ("timeout_min", [10**14, 0, 1.5, True], [60, 527040]),
        ("signal_delay_s", [65536, -1], [120]),
        ("partition", ["", " ", "a b", "low\n#SBATCH --uid=0", "x" * 5000], ["low,high"]),
        ("account", ["", "$(id)", "a;b"], ["a-1"]),
        ("dependency", ["", "garbage", "afterok", "afterok:", "afterok:1,,2", "afterok:x"], []),
        (
            "dependency",
            ["afterok:1\n"],
            ["afterok:12:13", "singleton", "afterany:1_2?after:3+5", "aftercorr:7_*"],
        ),
        ("mem_gb", [0, -1.0, math.inf, math.nan, 1e300], [0.5]),
        ("mem_per_cpu", ["", "much"], ["4G", "500"]),
        ("gres", ["", "gpu 8"], ["gpu:h100:8,license/x:1"]),
        ("constraint", ["", "a b"], ["[a100|h100]&ib"]),
        ("exclude", ["", "n1 n2"], ["n[1-4,7],m3"]),
        ("nodelist", ["\n"], ["n1"]),
        ("mail_type", ["", "SOMETIMES"], ["END,FAIL"]),
        ("mail_user", ["", "a b"], ["a@b.c"]),
        ("comment", ["", "a\nb", "\udcff"], ["any text, even long"]),
        ("name", ["", "a\x1bb"], ["my run"]),
        ("sweep", ["", "a\nb"], ["a/b"]),
        ("wckey", [""], ["plimsoll"]),
        ("ledger", ["", "a\x00b"], ["a b/c.jsonl"]),
        ("setup", [["a\nb"], [""], "x"], [["module load cuda"]]),
        ("max_preemptions", [-2, 10**23], [-1]),
        ("nodes", [0, 10**23], [1]),
    ],
)
def test_every_launcher_option_is_checked(
    name: str, values: list[Any], accepted: list[Any]
) -> None:
    for value in values:
        with pytest.raises(UserError, match=f"hydra.launcher.{name}=") as error:
            slurm_options({name: value})
        assert "must be" in str(error.value)
        assert str(error.value).isprintable()
        assert len(str(error.value)) < 500
    for value in accepted:
        assert getattr(slurm_options({name: value}), name) == value


def test_all_options_that_are_numbers_or_texts_have_a_check() -> None:
    checked = {*option_checks.RANGES, *option_checks.FORMS, *option_checks.LISTS, "mem_gb"}
    plain = {"_target_", "resubmit", "additional_parameters"}
    for kind in (SlurmOptions, LocalOptions):
        for one in dataclasses.fields(kind):
            if one.type not in ("bool", bool):
                assert one.name in checked | plain, one.name


@pytest.mark.parametrize(
    ("row", "count"),
    [("7_[0-999999999]", MOST_TASKS), ("7_[5-3]", 0), ("7_[" + "9" * 99 + "]", None)],
)
def test_absurd_ranges_of_accounting_end(row: str, count: int | None) -> None:
    tasks = tasks_of(row)
    assert len(tasks) <= MOST_TASKS
    assert count is None or len(tasks) == count


def test_a_time_in_slurms_form_is_told_in_minutes() -> None:
    with pytest.raises(UserError, match=r"must be in minutes: type timeout_min=1440\.$"):
        slurm_options({"timeout_min": "1-00:00:00"})


def test_a_folder_that_holds_no_model_is_refused_before_the_queue(
    fake: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    points = [point(n, actor_rollout_ref__model__path=str(folder)) for n in range(3)]
    with pytest.raises(UserError, match="holds adapters") as caught:
        launch_on_slurm(points, {"ledger": str(tmp_path / "ledger")}, tmp_path / "sweep")
    assert str(caught.value).count("holds adapters") == 1
    assert not list(fake.glob("script*"))
