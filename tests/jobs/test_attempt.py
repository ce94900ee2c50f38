"""The line of an attempt: the same fields whatever ended it, and the time that it really used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jobs.attempt.bookkeeping import begin, end
from jobs.records import attempts
from trainer.base import atomic

PLAN = {
    "launch": "L",
    "gpus": 8,
    "limit_s": 36000,
    "signal_delay_s": 60,
    "budgets": {"preempted": None, "timeout": 1, "node_failure": 1, "bad_node": 1},
}
FIELDS = {
    "attempt",
    "launch",
    "job",
    "nodes",
    "start",
    "end",
    "wall_s",
    "gpu_s",
    "step_from",
    "step_to",
    "cause",
    "exit_code",
    "why",
    "requeue",
    "bad_nodes",
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    atomic.write_json(tmp_path / "job.json", PLAN)
    return tmp_path


def start(run: Path, at: float, sacct: str = "", nodes: str = "n[1-2]") -> str:
    return begin(run, job="7_3", nodes=nodes, restarts=0, sacct=sacct, now=at)


def step(run: Path, number: int) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": number}) + "\n")


def show(**fields: str) -> str:
    return " ".join(
        f"{k}={v}"
        for k, v in (
            {"JobState": "RUNNING", "Restarts": "0", "PreemptTime": "None"} | fields
        ).items()
    )


@pytest.mark.parametrize(
    ("cause", "given"),
    [
        ("done", {"exit_code": 0, "scontrol": show()}),
        ("error", {"exit_code": 1, "scontrol": show()}),
        ("preempted", {"exit_code": 85, "scontrol": show(PreemptTime="1050")}),
        ("requeued", {"exit_code": 85, "scontrol": show(JobState="COMPLETING", Restarts="1")}),
        ("signalled", {"exit_code": 85, "scontrol": show()}),
        # Slurm's own limit decides: an operator may have changed it since the job was submitted.
        ("timeout", {"exit_code": 85, "scontrol": show(TimeLimit="00:02:00")}),
        ("cancelled", {"exit_code": 85, "scontrol": show(JobState="COMPLETING")}),
        ("out_of_memory", {"exit_code": 137, "scontrol": show(JobState="OUT_OF_MEMORY")}),
        ("bad_node", {"exit_code": 77, "scontrol": show(), "bad_node": "n2"}),
        ("node_failure", None),
    ],
)
def test_every_cause_has_nodes_steps_wall_and_gpu_seconds(
    run: Path, cause: str, given: dict[str, Any] | None
) -> None:
    assert start(run, 1000.0) == "1"
    step(run, 12)
    if given is None:  # the batch script died with its node: the next attempt writes the line
        assert (
            start(run, 5000.0, sacct="NODE_FAIL|0:0|n[1-2]|1090\nRUNNING|0:0|n3|Unknown\n") == "2"
        )
    else:
        end(run, number=1, now=1090.0, **({"bad_node": ""} | given))
    (line,) = attempts(run)
    assert set(line) == FIELDS and line["cause"] == cause
    assert (line["nodes"], line["wall_s"], line["gpu_s"]) == ("n[1-2]", 90.0, 720.0)
    assert (line["step_from"], line["step_to"], line["launch"]) == (0, 12, "L")
    assert line["requeue"] == (
        cause in ("preempted", "requeued", "signalled", "timeout", "bad_node", "node_failure")
    )


def test_without_accounting_a_lost_attempt_lasted_until_it_last_wrote(run: Path) -> None:
    start(run, 1000.0)
    step(run, 3)
    os.utime(run / "metrics.jsonl", (1400.0, 1400.0))
    os.utime(run / "logs/attempt_1/begin.json", (1000.0, 1000.0))
    start(run, 9000.0, sacct="NODE_FAIL|0:0|n1|500\n")  # of an attempt before
    assert attempts(run)[0]["wall_s"] == 400.0


def test_an_attempt_goes_on_from_its_checkpoint_not_from_what_was_logged(run: Path) -> None:
    start(run, 1000.0)
    step(run, 14)
    for number in (5, 10, 12):
        (run / f"checkpoints/step_{number}").mkdir(parents=True)
    for number in (5, 10):  # 12 was never committed
        (run / f"checkpoints/step_{number}/manifest.json").touch()
    start(run, 2000.0, sacct="NODE_FAIL|0:0|n1|1500\n")
    assert attempts(run)[0]["step_to"] == 14
    assert json.loads((run / "logs/attempt_2/begin.json").read_text())["step"] == 10


def test_the_budget_for_lost_nodes_ends_a_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(run, 1000.0)
    assert start(run, 2000.0, sacct="NODE_FAIL|0:0|n1|1500\n") == "2"
    assert start(run, 3000.0, sacct="NODE_FAIL|0:0|n1|2500\n") == "stop"
    assert "budget of 1 for 'node_failure' is used up" in capsys.readouterr().err
    assert [line["requeue"] for line in attempts(run)] == [True, False]


def test_a_resubmit_does_not_pay_for_what_was_lost_before(run: Path) -> None:
    start(run, 1000.0)
    start(run, 2000.0, sacct="NODE_FAIL|0:0|n1|1500\n")
    atomic.write_json(run / "job.json", PLAN | {"launch": "M"})
    assert start(run, 3000.0, sacct="NODE_FAIL|0:0|n1|2500\n") == "3"  # the old launch's second one
    assert start(run, 4000.0, sacct="NODE_FAIL|0:0|n1|3500\n") == "4"
    assert start(run, 5000.0, sacct="NODE_FAIL|0:0|n1|4500\n") == "stop"
    assert [line["launch"] for line in attempts(run)] == ["L", "L", "M", "M"]


def test_a_batch_script_back_from_a_node_that_was_cut_off_changes_nothing(run: Path) -> None:
    start(run, 1000.0)
    start(run, 2000.0, sacct="NODE_FAIL|0:0|n1|1500\n")
    assert (
        end(run, number=1, exit_code=85, scontrol=show(), bad_node="", now=2100.0) == "stop lost -"
    )
    assert len(attempts(run)) == 1
