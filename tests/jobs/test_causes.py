"""Details of a cause that the table of all rows (test_ending_table) does not show, and what follows
from a cause: a lost preemption costs a run, a requeued user error costs a cluster.
"""

from __future__ import annotations

from typing import Any

import pytest

from jobs.attempt.causes import (
    Cause,
    Ending,
    cause_by_accounting,
    cause_of,
    parse_nodes,
    parse_show_job,
)
from jobs.attempt.decision import Decision, budgets_from, decide
from jobs.submit.options import slurm_options
from trainer.base.rank_records import RankEnd, RankRecord

RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "Restarts": "0"}
LATE = {"elapsed_s": 3500.0, "limit_s": 3600.0, "signal_delay_s": 120.0}


def rank_end(kind: str, **fields: Any) -> dict[int, RankRecord]:
    """The records of a run of one rank, which is on node n1."""
    end = RankEnd(kind=kind, exit_code=1, host="n1", time=1.0, **fields)
    return {0: RankRecord(host="n1", end=end)}


SAVED: dict[str, Any] = {"exit_code": 85, "records": rank_end("stopped", stop="USR2")}
KILLED: dict[str, Any] = {"exit_code": 137, "records": {0: RankRecord(host="n1")}}


def asked_to_stop_by_srun(**first: Any) -> dict[int, RankRecord]:
    """The records of two ranks: the second one had TERM, because the first one failed."""
    stopped = RankEnd(kind="stopped", exit_code=85, host="n2", time=2.0, stop="TERM")
    return {0: RankRecord(host="n1", **first), 1: RankRecord(host="n2", end=stopped)}


FAILED = RankEnd(kind="crash", exit_code=1, host="n1", time=1.0)
LOST = RankEnd(kind="lost_peer", exit_code=1, host="n1", time=1.0)


@pytest.mark.parametrize(
    ("cause", "ending"),
    [
        # srun sends TERM to the ranks that are left when one has failed: nobody else asked for it.
        ("crash", Ending(exit_code=139, tasks=2, records=asked_to_stop_by_srun(), slurm=RUNNING)),
        ("crash", Ending(exit_code=137, tasks=2, records=asked_to_stop_by_srun(), slurm=RUNNING)),
        (
            "crash",
            Ending(exit_code=85, tasks=2, records=asked_to_stop_by_srun(end=FAILED), slurm=RUNNING),
        ),
        (
            "node_failure",
            Ending(exit_code=85, tasks=2, records=asked_to_stop_by_srun(end=LOST), slurm=RUNNING),
        ),
        # The preemption time of an earlier attempt, which Slurm still shows, doesn't make this time
        # limit a preemption.
        (
            "timeout",
            Ending(**SAVED, slurm=RUNNING | {"PreemptTime": "1000"}, started=2000.0, **LATE),
        ),
        ("preempted", Ending(**SAVED, slurm=RUNNING | {"PreemptTime": "2001"}, started=2000.5)),
        # Saving took longer than the grace time: Slurm has queued it again already.
        (
            "preempted",
            Ending(
                **SAVED,
                slurm={"JobState": "PENDING", "Restarts": "1", "PreemptTime": "2001"},
                started=2000.0,
            ),
        ),
        # Slurm killed a rank while it was still starting: nothing was lost but the start.
        ("preempted", Ending(exit_code=140, slurm=RUNNING | {"PreemptTime": "2001"})),
        ("signalled", Ending(exit_code=140, slurm=RUNNING)),
        (
            "signalled",
            Ending(**SAVED, slurm=RUNNING, elapsed_s=5, limit_s=3600, signal_delay_s=120),
        ),
        ("timeout", Ending(**SAVED, slurm=RUNNING, **LATE)),
        (
            "timeout",
            Ending(**SAVED, slurm=RUNNING, elapsed_s=3421, limit_s=3600, signal_delay_s=120),
        ),
        # Steps are long: the trainer saved before Slurm warned it.
        (
            "timeout",
            Ending(
                exit_code=85,
                records=rank_end("stopped", stop="TIME"),
                slurm=RUNNING,
                elapsed_s=1800,
                limit_s=3600,
            ),
        ),
        (
            "timeout",
            Ending(**SAVED, slurm={"JobState": "COMPLETING"}, elapsed_s=3605, limit_s=3600),
        ),
        (
            "requeued",
            Ending(**SAVED, slurm={"JobState": "COMPLETING", "Restarts": "1"}, restarts=0),
        ),
        ("requeued", Ending(**SAVED, slurm={"JobState": "PENDING", "Restarts": "3"}, restarts=2)),
        ("signalled", Ending(**SAVED, slurm={"JobState": "RUNNING", "Restarts": "2"}, restarts=2)),
        (
            "cancelled",
            Ending(**SAVED, slurm={"JobState": "COMPLETING", "Restarts": "0"}, limit_s=3600),
        ),
        ("out_of_memory", Ending(**KILLED, slurm=RUNNING, memory_kill=True)),
        ("out_of_memory", Ending(**KILLED, slurm=RUNNING | {"Reason": "OutOfMemory"})),
        ("crash", Ending(**KILLED, slurm=RUNNING)),
        # Another process of the job was killed for its memory, and the rank's own error is another.
        (
            "crash",
            Ending(exit_code=1, records=rank_end("crash"), slurm=RUNNING, memory_kill=True),
        ),
        # Ranks that save within the blink in which Slurm's signal is still on its way.
        ("signalled", Ending(**SAVED, slurm=RUNNING | {"JobState": "SIGNALING"}, limit_s=3600)),
        ("timeout", Ending(**SAVED, slurm=RUNNING | {"JobState": "SIGNALING"}, **LATE)),
        ("signalled", Ending(**SAVED, slurm=None, elapsed_s=5, limit_s=3600)),
        # A user's os._exit(85) or os._exit(77) is no saved stop and no bad node.
        ("crash", Ending(exit_code=85, records=rank_end("crash"), slurm=RUNNING)),
        ("crash", Ending(exit_code=77, records=rank_end("crash"), slurm=RUNNING)),
    ],
)
def test_cause(cause: str, ending: Ending) -> None:
    assert cause_of(ending).name == cause


@pytest.mark.parametrize(
    ("nodes", "ending"),
    [
        # A job of one node whose launch failed is that node's.
        (("n1",), Ending(exit_code=233, nodes=["n1"], slurm=RUNNING)),
        # Two ranks a node: rank 5 is on the third.
        (
            ("n3",),
            Ending(
                exit_code=1,
                tasks=6,
                nodes=["n1", "n2", "n3"],
                records={rank: RankRecord(host=f"n{1 + rank // 2}") for rank in range(5)},
            ),
        ),
        (("n1",), Ending(exit_code=77, nodes=["n1", "n2"], tasks=2, bad_nodes=["n1"])),
        (("n1",), Ending(exit_code=None, nodes=["n1"], accounting="NODE_FAIL")),
        ((), Ending(exit_code=None, nodes=["n1", "n2"], tasks=2, accounting="NODE_FAIL")),
    ],
)
def test_the_node_to_blame(nodes: tuple[str, ...], ending: Ending) -> None:
    assert cause_of(ending).nodes == nodes


def test_a_cause_says_what_happened() -> None:
    crash = Ending(exit_code=1, records=rank_end("crash", message="the tensor is on fire"))
    assert cause_of(crash).detail == "n1: the tensor is on fire"
    wrong = Ending(exit_code=2, records=rank_end("user_error", message="data.x: no such file"))
    assert cause_of(wrong).detail == "data.x: no such file"
    segfault = Ending(exit_code=139, records={0: RankRecord(host="n1")}, nodes=["n1"])
    assert cause_of(segfault).detail == "a process was killed by SIGSEGV"
    assert "killed by SIGKILL" in cause_of(Ending(**KILLED, nodes=["n1"])).detail
    ended = Ending(exit_code=0, records={0: RankRecord(host="n1")}, nodes=["n1"])
    assert cause_of(ended).detail == "rank 0 left no record of its end; exit code 0"
    assert cause_of(Ending(exit_code=1, tasks=4)).detail == "4 of 4 processes never began"


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "timeout"),
        ("NODE_FAIL", "node_failure"),
        ("CANCELLED by 0", "cancelled"),
        ("OUT_OF_MEMORY", "out_of_memory"),
        ("FAILED", "crash"),
        ("REQUEUED", "requeued"),
        ("CANCELLED+", "cancelled"),
        ("COMPLETED", None),
        ("", None),
    ],
)
def test_cause_by_accounting(state: str, cause: str | None) -> None:
    assert cause_by_accounting(state) == cause


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("", []),
        ("n1 mixed\nn2 allocated\n", []),
        ("n1 mixed\nn2 down*\n", ["n2"]),
        ("n1 mixed\nn2 allocated*\n", ["n2"]),  # not responding
        ("n1 mixed\nn2 allocated\nn2 silent\n", ["n2"]),
        # Slurm starts nothing for this job any more: its nodes are not to blame.
        ("n1 completing\nn2 completing\nn1 silent\nn2 silent\n", []),
        ("n1 completing\nn2 down\nn1 silent\nn2 silent\n", ["n2"]),
        ("n3 down\nslurm_load_node error: Unable to contact\n", []),
    ],
)
def test_dead_nodes(text: str, dead: list[str]) -> None:
    assert parse_nodes(text, ["n1", "n2"]) == dead


def follow(
    cause: str,
    earlier: list[str],
    budgets: dict[str, int | None],
    nodes: tuple[str, ...] = (),
    step: int = 99,
) -> Decision:
    """The decision after attempts that ended at steps 0, 1, 2, ... and this one at ``step``."""
    lines = [
        {"cause": name, "step_to": number, "bad_nodes": []} for number, name in enumerate(earlier)
    ]
    return decide(Cause(name=cause, nodes=nodes), step, lines, budgets)


@pytest.mark.parametrize("cause", ["error", "cancelled", "done", "unheard-of"])
def test_never_queued_again(cause: str) -> None:
    budgets = dict.fromkeys(("preempted", "timeout", "node_failure", "bad_node", "crash"), 9)
    assert follow(cause, [], {**budgets}).requeue is False


def test_budgets_are_counted_by_cause() -> None:
    budgets: dict[str, int | None] = {"preempted": None, "timeout": 2, "bad_node": 1, "crash": 2}
    assert follow("preempted", ["preempted"] * 500, budgets).requeue
    assert follow("timeout", ["preempted"] * 9 + ["timeout"], budgets).requeue
    used_up = follow("timeout", ["timeout", "preempted", "timeout"], budgets)
    assert not used_up.requeue and "budget of 2" in used_up.why
    assert not follow("bad_node", ["bad_node"], budgets).requeue
    assert follow("crash", ["node_failure", "crash", "preempted"], budgets).requeue
    assert not follow("out_of_memory", ["crash", "out_of_memory"], budgets).requeue
    assert not follow("node_failure", [], budgets).requeue  # a budget that is missing is none


def test_a_crash_after_the_same_step_is_final() -> None:
    budgets: dict[str, int | None] = {"crash": 9, "node_failure": 9}
    assert follow("crash", ["crash", "crash"], budgets, step=2).requeue
    again = follow("crash", ["crash", "preempted"], budgets, step=0)
    assert not again.requeue and again.why == "crash: for the second time after step 0"
    assert follow("crash", ["node_failure"], budgets, step=0).requeue
    assert follow("node_failure", ["node_failure"], budgets, step=0).requeue


def test_nodes_that_failed_are_avoided_by_all_later_attempts() -> None:
    earlier = [{"cause": "node_failure", "step_to": 1, "bad_nodes": ["n3"]}]
    for cause in ("bad_node", "preempted"):
        decision = decide(
            Cause(name=cause, nodes=("n1",)), 2, earlier, {"bad_node": 1, "preempted": None}
        )
        assert decision.exclude == ("n1", "n3")


def test_the_budgets_of_the_options() -> None:
    budgets = budgets_from(slurm_options({"max_crashes": 5, "max_preemptions": -1}))
    assert budgets["crash"] == 5 and budgets["preempted"] is None
    assert budgets_from(slurm_options({}))["crash"] == 2


def test_the_line_for_the_shell_holds_only_harmless_words() -> None:
    decision = follow("bad_node", [], {"bad_node": None}, ("n1", "n2; reboot", "n1"))
    assert decision.line() == "requeue bad_node n1"


def test_scontrol_output() -> None:
    seen = parse_show_job(
        "JobId=7 JobName=a b=c JobState=RUNNING Reason=None\n   PreemptTime=None Restarts=2 "
    )
    assert (seen["JobState"], seen["Restarts"], seen["PreemptTime"]) == ("RUNNING", "2", "None")
