"""Further arguments of sbatch and srun: every form that Slurm takes becomes the same option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.hydra_entry import launch_on_slurm
from jobs.submit.arguments import parse, srun_words
from tests.jobs.conftest import point
from trainer.base.errors import UserError

FORMS = [
    ("-C gpu", "constraint", "gpu"),
    ("-Cgpu", "constraint", "gpu"),
    ("-C=gpu", "constraint", "gpu"),
    ("--constraint gpu", "constraint", "gpu"),
    ("--constraint=gpu", "constraint", "gpu"),
    ("--constraint 'a b'", "constraint", "a b"),
    ("-A acct", "account", "acct"),
    ("-H", "hold", None),
    ("--exclusive", "exclusive", None),
    ("--exclusive=user", "exclusive", "user"),
    ("--core_spec=2", "core-spec", "2"),
]


@pytest.mark.parametrize(("text", "name", "value"), FORMS)
def test_every_form_is_one_option(text: str, name: str, value: str | None) -> None:
    one = parse(text, "key")
    assert (one.name, one.value) == (name, value)


def launch(folder: Path, cluster: dict[str, Any] | None = None, **options: Any) -> None:
    launch_on_slurm(
        [point(0, cluster=cluster)], {"ledger": str(folder / "l"), **options}, folder / "sweep"
    )


def test_the_script_has_long_options(fake: Path, tmp_path: Path) -> None:
    launch(
        tmp_path,
        {"sbatch_args": ["-A acct", "-Cgpu", "--exclusive"], "srun_args": ["--cpu-bind cores"]},
        additional_parameters={"reservation": "r 1", "L": "lic"},
    )
    script = (fake / "script0").read_text()
    for line in (
        "--account=acct",
        "--constraint=gpu",
        "--exclusive",
        "--reservation='r 1'",
        "--licenses=lic",
    ):
        assert f"\n#SBATCH {line}\n" in script
    assert " --cpu-bind cores bash " in script


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"sbatch_args": ["-A", "acct"]}, {}, "'-A' needs a value; write '--account=VALUE'"),
    ({"sbatch_args": ["acct"]}, {}, "'acct' is not one argument"),
    ({"sbatch_args": ["--hold x"]}, {}, "'x' does not belong to '--hold'"),
    ({"sbatch_args": ["-Z"]}, {}, "'-Z' is no option of Slurm"),
    ({"sbatch_args": ["--A acct"]}, {}, "'--A acct' is not one argument"),
    ({"sbatch_args": ["--comment='x"]}, {}, "has an open quote"),
    ({"sbatch_args": ["-t 5"]}, {}, "--time is set by the plan; set hydra.launcher.timeout_min"),
    ({"sbatch_args": ["-N2"]}, {}, "--nodes is set by the plan; set trainer.nnodes"),
    ({"sbatch_args": ["--export=NONE"]}, {}, "name variables in cluster.env"),
    ({"sbatch_args": ["-p x"]}, {}, "set cluster.partition"),
    ({"sbatch_args": ["--gpus=2"]}, {}, "set trainer.n_gpus_per_node"),
    ({"sbatch_args": ["-A b"], "account": "a"}, {}, "set cluster.account"),
    ({"sbatch_args": ["--mem-per-cpu=1G"], "mem_gb": 4}, {}, "hydra.launcher.mem_per_cpu"),
    ({}, {"additional_parameters": {"no_requeue": True}}, "additional_parameters: --no-requeue"),
    ({}, {"additional_parameters": {"hold": False}}, "true for a flag"),
    ({}, {"additional_parameters": {"comment": "x\n#SBATCH --uid=0"}}, "must be a text"),
    ({"srun_args": ["-n 4"]}, {}, "cluster.srun_args: --ntasks is set by the batch script"),
    ({}, {"srun_args": ["--container-image=x"]}, "set container.runtime=pyxis"),
    ({}, {"srun_args": ["--mpi='x"]}, 'hydra.launcher.srun_args: "--mpi=\'x" has an open quote'),
]


@pytest.mark.parametrize(("cluster", "options", "message"), REFUSED)
def test_what_is_no_argument_or_contradicts_the_plan_is_refused(
    cluster: dict[str, Any], options: dict[str, Any], message: str, fake: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        launch(tmp_path, cluster, **options)
    assert message in str(error.value) and not list(fake.glob("script*"))


def test_values_of_srun_may_be_items_of_their_own() -> None:
    assert srun_words(["--mpi", "none", "--cpu-bind cores"]) == [
        "--mpi",
        "none",
        "--cpu-bind",
        "cores",
    ]
