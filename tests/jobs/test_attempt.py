"""The line of an attempt: the same fields whatever ended it, and the time that it really used."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jobs.attempt.bookkeeping import begin, end
from jobs.attempt.evidence import ShellEvidence
from jobs.records import attempts
from trainer.base import atomic, memory, rank_records
from trainer.base.run_folder import last_attempt, log_folder

PLAN = {
    "launch": "L",
    "gpus": 8,
    "tasks": 2,
    "limit_s": 36000,
    "signal_delay_s": 60,
    "budgets": {"preempted": None, "timeout": 1, "node_failure": 1, "bad_node": 1, "crash": 2},
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


def finish(run: Path, number: int = 1, now: float = 1090.0, **shell: Any) -> str:
    return end(run, number, ShellEvidence(**{"exit_code": 0, "scontrol": show()} | shell), now)


def leave(run: Path, number: int = 1, **ends: str | None) -> None:
    """The records of ranks 0 and 1; a rank that is not named never began."""
    folder = log_folder(run, number)
    for name, kind in ends.items():
        rank = int(name.removeprefix("rank_"))
        rank_records.write_begin(folder, rank)
        if kind is not None:
            rank_records.write_end(folder, rank, kind=kind, exit_code=1, message="its words")


BOTH_STOPPED = {"rank_0": "stopped", "rank_1": "stopped"}


@pytest.mark.parametrize(
    ("cause", "ends", "given"),
    [
        ("done", {"rank_0": "finished", "rank_1": "finished"}, {}),
        ("error", {"rank_0": "user_error", "rank_1": "lost_peer"}, {"exit_code": 2}),
        ("crash", {"rank_0": "lost_peer", "rank_1": "crash"}, {"exit_code": 1}),
        ("crash", {"rank_0": None, "rank_1": None}, {"exit_code": 0}),
        ("preempted", BOTH_STOPPED, {"exit_code": 85, "scontrol": show(PreemptTime="1050")}),
        (
            "requeued",
            BOTH_STOPPED,
            {"exit_code": 85, "scontrol": show(JobState="COMPLETING", Restarts="1")},
        ),
        ("signalled", BOTH_STOPPED, {"exit_code": 85}),
        # Slurm's own limit decides: an operator may have changed it since the job was submitted.
        ("timeout", BOTH_STOPPED, {"exit_code": 85, "scontrol": show(TimeLimit="00:02:00")}),
        ("cancelled", BOTH_STOPPED, {"exit_code": 85, "scontrol": show(JobState="COMPLETING")}),
        ("out_of_memory", {}, {"exit_code": 137, "scontrol": show(JobState="OUT_OF_MEMORY")}),
        ("bad_node", {}, {"exit_code": 77, "bad_nodes": "n2"}),
        ("node_failure", {"rank_0": "lost_peer"}, {"exit_code": 1, "nodes": "n2 silent"}),
        ("node_failure", {"rank_0": None, "rank_1": None}, None),
    ],
)
def test_every_cause_has_nodes_steps_wall_and_gpu_seconds(
    run: Path, cause: str, ends: dict[str, str | None], given: dict[str, Any] | None
) -> None:
    assert start(run, 1000.0) == "1"
    step(run, 12)
    leave(run, **ends)
    if given is None:  # the batch script died with its node: the next attempt writes the line
        assert (
            start(run, 5000.0, sacct="NODE_FAIL|0:0|n[1-2]|1090\nRUNNING|0:0|n3|Unknown\n") == "2"
        )
    else:
        finish(run, **given)
    (line,) = attempts(run)
    assert set(line) == FIELDS and line["cause"] == cause
    assert (line["nodes"], line["wall_s"], line["gpu_s"]) == ("n[1-2]", 90.0, 720.0)
    assert (line["step_from"], line["step_to"], line["launch"]) == (0, 12, "L")
    assert line["requeue"] == (cause not in ("done", "error", "cancelled"))
    assert line["bad_nodes"] == (["n2"] if given and {"bad_nodes", "nodes"} & set(given) else [])


def test_crashes_are_queued_again_as_often_as_allowed_unless_at_the_same_step(run: Path) -> None:
    for number, (at_step, verdict) in enumerate([(3, "requeue"), (5, "requeue"), (9, "stop")], 1):
        start(run, 1000.0 * number)
        step(run, at_step)
        leave(run, number, rank_0="crash", rank_1=None)
        assert finish(run, number, exit_code=1).startswith(f"{verdict} crash")
    assert "its words): the budget of 2 for 'crash' is used up" in attempts(run)[-1]["why"]
    atomic.write_json(run / "job.json", PLAN | {"launch": "M"})  # a resubmit
    for number, verdict in ((4, "requeue"), (5, "stop")):
        start(run, 1000.0 * number)
        leave(run, number, rank_0="crash", rank_1=None)
        assert finish(run, number, exit_code=1).startswith(f"{verdict} crash")
    assert attempts(run)[-1]["why"].endswith("for the second time after step 9")


def test_what_the_ranks_recorded_counts_also_when_the_batch_script_died(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(run, 1000.0)
    leave(run, rank_0="finished", rank_1=None)
    assert start(run, 2000.0, sacct="NODE_FAIL|0:0|n1|1500\n") == "done"
    assert [(line["cause"], line["requeue"]) for line in attempts(run)] == [("done", False)]
    assert last_attempt(run) == 1
    start(run, 3000.0)
    leave(run, 2, rank_0="user_error", rank_1="user_error")
    assert start(run, 4000.0, sacct="NODE_FAIL|0:0|n1|3500\n") == "stop"
    assert attempts(run)[-1]["cause"] == "error"
    assert "its words" in capsys.readouterr().err


def test_a_memory_kill_is_read_from_slurms_words_in_a_log(run: Path) -> None:
    start(run, 1000.0)
    leave(run, rank_0=None, rank_1=None)
    log = log_folder(run, 1) / "rank_1.log"
    log.write_text("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.1. Some of your\n")
    assert finish(run, exit_code=137).startswith("requeue out_of_memory")


def test_a_memory_kill_is_read_from_the_kernels_counter(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [3]
    monkeypatch.setattr(memory, "oom_kills", lambda: kills[0])
    start(run, 1000.0)
    leave(run, rank_0=None, rank_1=None)
    kills[0] = 4
    assert finish(run, exit_code=137).startswith("requeue out_of_memory")
    start(run, 2000.0)
    leave(run, 2, rank_0=None, rank_1=None)
    assert finish(run, 2, exit_code=137).startswith("stop crash")


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
    assert finish(run, exit_code=85, now=2100.0) == "stop lost -"
    assert len(attempts(run)) == 1
