"""What passes of the submitting environment, as a list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs.environment import (
    RUN_VARIABLES,
    client_environment,
    notices,
    passes,
    run_environment,
)
from jobs.submit.cluster_config import Cluster
from trainer.base.errors import UserError

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "PLIMSOLL_CACHE",
    "PLIMSOLL_FINISH_GRACE_S",
    "PLIMSOLL_KILL_GRACE_S",
    "PLIMSOLL_LEDGER",
    "PLIMSOLL_WORKER_MODULE",
}
"""Variables of ours that a user or a test sets; all others are one run's."""


def test_every_variable_of_a_run_is_known_as_one() -> None:
    texts = [p.read_text() for part in ("trainer", "jobs") for p in (ROOT / part).rglob("*.py")]
    named = {name for text in texts for name in re.findall(r'"(PLIMSOLL_[A-Z_]+)"', text)}
    assert named - SETTINGS == set(RUN_VARIABLES)


def test_names_of_the_site_pass_and_prefixes_have_exceptions() -> None:
    assert passes("WANDB_API_KEY", ()) and not passes("WANDB_RUN_ID", ())
    assert passes("MY_KEY", ("MY_KEY",)) and not passes("MY_KEY_2", ("MY_KEY",))


def test_slurm_s_other_commands_lose_their_options_only() -> None:
    env = {"SQUEUE_FORMAT": "x", "SLURM_CONF": "c", "SLURM_JOB_ID": "1", "A": "b"}
    assert client_environment(env) == {"SLURM_CONF": "c", "A": "b"}


def test_a_run_on_this_machine_keeps_all_but_leftovers() -> None:
    env = {"RANK": "5", "SLURM_PROCID": "1", "PLIMSOLL_ATTEMPT": "4", "OMP_NUM_THREADS": "2"}
    assert run_environment(env) == {"OMP_NUM_THREADS": "2"}


def test_options_of_sbatch_are_told_beside_the_plan() -> None:
    env = {"SBATCH_PARTITION": "x", "SBATCH_RESERVATION": "r", "SBATCH_MEM_PER_NODE": "1"}
    assert notices(env, (), {"partition": "low", "mem": "2MB"}) == [
        "SBATCH_MEM_PER_NODE=1 in your environment is not used: the plan says --mem=2MB",
        "SBATCH_PARTITION=x in your environment is not used: the plan says --partition=low",
        "SBATCH_RESERVATION=r in your environment is not used: the plan doesn't set it "
        "(cluster.sbatch_args)",
    ]


@pytest.mark.parametrize("name", ["a b", "SBATCH_QOS", "SLURM_JOB_ID", "PLIMSOLL_ATTEMPT"])
def test_a_site_can_t_pass_what_slurm_or_the_script_sets(name: str) -> None:
    with pytest.raises(UserError, match=r"cluster\.env"):
        Cluster(env=(name,))
