"""Sweeps by ``python -m trainer -m`` and the commands of ``jobs``, on a real Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jobs.records import attempts
from tests.system.conftest import python_binds
from tests.system.slurm_runs import ROOT, slurm
from trainer.base.run_folder import read_json

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]
BUCKETS = "actor_rollout_ref.actor.bucket_boundaries=[32,64],[64]"
BUDGETS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512,1024"
COMMON = (
    "cluster=dev",
    "cluster.env=[PYTHONPATH,PLIMSOLL_WORKER_MODULE]",
    "data.task=arithmetic",
    "data.max_prompt_length=64",
    "data.max_response_length=32",
    "actor_rollout_ref.model.path=builtin:tiny",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=4",
    "trainer.total_training_steps=3",
    "trainer.val_before_train=false",
    "trainer.logger=[console]",
)


LEAKED = {
    "SBATCH_TIMELIMIT": "1",
    "SBATCH_NO_REQUEUE": "1",
    "SBATCH_EXPORT": "NONE",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_NTASKS": "7",
    "SRUN_NTASKS": "7",
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "5",
    "MASTER_PORT": "1",
}
"""What a shell may hold in which a sweep is submitted; no job follows it."""


class Lab:
    """Runs commands in a folder of its own, with its own ledger, in a shell full of leftovers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {
            **os.environ,
            **LEAKED,
            "PYTHONPATH": str(ROOT),
            "PLIMSOLL_LEDGER": str(folder / "ledger.jsonl"),
            "PLIMSOLL_WORKER_MODULE": "tests.jobs.standin",
            "WANDB_MODE": "offline",
        }

    def command(
        self, *words: str, code: int | None = 0, timeout: float = 1700
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python -m ...`` in the folder; its exit code must be ``code`` (None: any)."""
        done = subprocess.run(
            [sys.executable, "-m", *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=self.env,
            cwd=self.folder,
        )
        assert code is None or done.returncode == code, (
            f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    def sweep(
        self, name: str, *words: str, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """``python -m trainer -m`` with the Slurm launcher, into the folder ``name``."""
        launcher = [
            f"hydra.sweep.dir={self.folder / name}",
            "hydra/launcher=slurm",
            "hydra.launcher.signal_delay_s=30",
        ]
        keys = {word.partition("=")[0] for word in words}
        common = [word for word in (*COMMON, *launcher) if word.partition("=")[0] not in keys]
        return self.command("trainer", "-m", *common, *words, code=code)

    def status(self, *words: str) -> list[dict]:
        """The rows of ``python -m jobs status --json``."""
        return [
            json.loads(line)
            for line in self.command("jobs", "status", "--json", *words).stdout.splitlines()
        ]


@pytest.fixture(scope="module")
def lab(slurm_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("sweep"))


def test_eight_jobs_of_two_shapes_inside_an_image(
    lab: Lab, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real trainer in the image, from the snapshot of the code: two arrays of four jobs."""
    monkeypatch.delitem(lab.env, "PLIMSOLL_WORKER_MODULE")
    words = [
        "container=apptainer",
        f"container.image={image}",
        f"container.python={sys.executable}",
        f"container.binds=[{','.join(python_binds())}]",
        "trainer.logger=[console,wandb]",
        "data.val_max_samples=2",
        "data.num_workers=0",
        "trainer.plot_interval=1000",
        "trainer.total_training_steps=1",
        BUCKETS,
        BUDGETS,
        "parallel=dp1,dp2",
    ]
    lab.sweep("eight", *words, "hydra.launcher.wait=true")
    rows = lab.status("eight")
    assert len(rows) == 8 and {row["state"] for row in rows} == {"COMPLETED"}
    assert {row["shape"] for row in rows} == {"1n1g", "1n2g"}
    assert len({row["job"].split("_")[0] for row in rows}) == 2
    for row in rows:
        run = Path(row["run"])
        assert read_json(run / "job.json")["image"]["digest"].startswith("sha256:")
        assert [line["cause"] for line in attempts(run)] == ["done"]
        ranks = 2 if row["shape"] == "1n2g" else 1
        assert len(list(run.glob("logs/attempt_1/rank_*.log"))) == ranks
        assert list(run.glob("checkpoints/step_1/manifest.json"))
    identities = [read_json(Path(row["run"]) / "wandb.json") for row in rows]
    assert {identity["group"] for identity in identities} == {"eight"}
    assert len({identity["id"] for identity in identities}) == 8
    table = lab.command("jobs", "status", "eight").stdout
    assert table.count("COMPLETED") == 8 and "bucket_boundaries=[32,64]" in table
    # The same sweep again submits nothing.
    again = lab.sweep("again", *words)
    assert "0 job(s)" in again.stdout and again.stdout.count("launched before") == 8


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_editing_the_config_after_submit_changes_nothing_and_a_failing_job_hides_no_other(
    lab: Lab,
) -> None:
    conf = lab.folder / "conf"
    shutil.copytree(ROOT / "conf", conf)
    # The jobs wait until every file was edited.
    slurm("scontrol", "update", "PartitionName=low", "State=DOWN")
    try:
        name = "trainer.experiment_name=good,crash1,crash2"
        lab.sweep(
            "edited",
            "container=none",
            name,
            "--config-path",
            str(conf),
            "trainer.total_training_steps=7",
        )
        for path in conf.rglob("*.yaml"):
            path.write_text("this: is not what was submitted\n")
        queued = lab.status("edited")[0]
        before = contents(Path(queued["run"]))
        refused = lab.sweep(
            "taken",
            "container=none",
            f"trainer.default_local_dir={queued['run']}",
            "trainer.total_training_steps=9",
            code=2,
        )
        assert f"belongs to edited/0 (Slurm job {queued['job']}" in refused.stderr
        assert "it is PENDING" in refused.stderr and "Traceback" not in refused.stderr
        assert contents(Path(queued["run"])) == before
        assert lab.status(queued["run"]) == [queued] and not (lab.folder / "taken").exists()
    finally:
        slurm("scontrol", "update", "PartitionName=low", "State=UP")
    done = lab.command("jobs", "status", "-f", "edited", code=1)
    rows = {
        row["overrides"][-1] + str(row["overrides"]): row["state"] for row in lab.status("edited")
    }
    assert sorted(rows.values()) == ["COMPLETED", "FAILED", "FAILED"]
    # The error of each failed job is shown.
    assert done.stderr.count("RuntimeError: this job was told to crash") == 2


def test_resubmit_logs_compare_and_cancel(lab: Lab) -> None:
    # Two at once: one submits, the other finds the runs taken, or submitted already.
    words = ["jobs", "resubmit", "edited", "--state", "failed"]
    with ThreadPoolExecutor(2) as pool:
        pair = [pool.submit(lab.command, *words, code=None) for _ in range(2)]
    answers = [future.result() for future in pair]
    assert [done.stdout.count("resubmitted 2 run(s)") for done in answers].count(1) == 1
    assert all(done.returncode == 0 or "belongs to edited/" in done.stderr for done in answers)
    done = lab.command("jobs", "status", "-f", "edited", code=1)
    rows = lab.status("edited")
    # Each launch tries a crash once more; the second one at the same step is final.
    assert sorted(row["attempt"] for row in rows) == [1, 4, 4] and "EXHAUSTED" not in done.stdout
    good = next(row["name"] for row in rows if row["state"] == "COMPLETED")
    assert "rank 0 of 1" in lab.command("jobs", "logs", good).stdout
    assert "rank 0 of 1" in lab.command("jobs", "logs", "-f", good).stdout
    # A metric's title takes as many lines as its column is narrow.
    assert "critic/score" in lab.command("jobs", "compare", good).stdout
    shown = lab.sweep("long", "container=none", "trainer.total_training_steps=100000,200000")
    assert "SBATCH_TIMELIMIT=1 in your environment is not used: the plan says" in shown.stdout
    array = lab.status("long")[0]["job"].split("_")[0]
    # One record before Slurm starts the first task, then one for each.
    shown_by_slurm = slurm("scontrol", "show", "job", array)
    for setting in ("TimeLimit=01:00:00", "Requeue=1"):
        values = re.findall(rf"{setting.split('=')[0]}=\S+", shown_by_slurm)
        assert values and set(values) == {setting}
    assert was_submitted(lab, "long")
    lab.command("jobs", "cancel", "long")
    lab.command("jobs", "status", "-f", "long", code=1)
    # At once, even where accounting lags.
    assert {row["state"] for row in lab.status("long")} == {"CANCELLED"}


def was_submitted(lab: Lab, name: str) -> bool:
    """Whether the controller knows a job of this sweep; accounting may lag."""
    return str(lab.folder / name) in slurm("squeue", "-h", "-a", "-t", "all", "-o", "%Z %o")


def test_wrong_input_never_reaches_sbatch(lab: Lab) -> None:
    done = lab.sweep("bad", "container=none", "trainer.n_gpus_per_node=2,4", code=2)
    assert (
        "has 2 GPUs" in done.stderr
        and "Traceback" not in done.stderr
        and not (lab.folder / "bad/code").exists()
    )
    assert not was_submitted(lab, "bad")


def test_dry_run_and_check_submit_nothing(lab: Lab) -> None:
    shown = lab.sweep(
        "dry", "container=none", "parallel=dp1,dp2", "hydra.launcher.dry_run=true"
    ).stdout
    assert (
        shown.count("#!/bin/bash") == 2
        and "GPU-hours" in shown
        and not (lab.folder / "dry" / "code").exists()
    )
    assert not was_submitted(lab, "dry")
    checked = lab.sweep(
        "dry", "container=none", "parallel=dp1,dp2", "hydra.launcher.check=true"
    ).stdout
    assert checked.count("to start at") == 2
    assert not was_submitted(lab, "dry")


def test_doctor_finds_a_wrong_image_and_a_missing_python(lab: Lab, image: Path) -> None:
    binds = [word for bind in python_binds() for word in ("--bind", bind)]
    good = lab.command(
        "jobs", "doctor", "--image", str(image), "--python", sys.executable, *binds, timeout=900
    )
    assert "torch" in good.stdout and "FAIL" not in good.stdout
    bad = lab.command(
        "jobs",
        "doctor",
        "--image",
        str(image),
        "--digest",
        "sha256:0",
        "--python",
        "nowhere",
        code=1,
    )
    assert bad.stdout.count("FAIL") == 2


def test_a_sweep_without_slurm_names_the_local_launcher(lab: Lab) -> None:
    env = {**lab.env, "PATH": str(Path(sys.executable).parent)}
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "-m", *COMMON, "hydra/launcher=slurm", "container=none"],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env=env,
        cwd=lab.folder,
    )
    assert done.returncode == 2 and "hydra/launcher=local" in done.stderr
