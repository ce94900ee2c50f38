"""The same exit code means different things: a lost preemption costs a run, a requeued user error
costs a cluster.
"""

from __future__ import annotations

import pytest

from jobs.attempt.causes import Ending, cause_of, cause_of_lost, decide, parse_show_job

RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "Restarts": "0"}
LATE = {"elapsed_s": 3500.0, "limit_s": 3600.0, "signal_delay_s": 120.0}


@pytest.mark.parametrize(
    ("cause", "ending"),
    [
        # The preemption time of an earlier attempt, which Slurm still shows, doesn't make this time
        # limit a preemption.
        (
            "timeout",
            Ending(
                exit_code=85,
                slurm=RUNNING | {"PreemptTime": "1000"},
                started=2000.0,
                **LATE,
            ),
        ),
        ("done", Ending(exit_code=0, slurm=RUNNING)),
        ("error", Ending(exit_code=1, slurm=RUNNING)),
        ("error", Ending(exit_code=2, slurm=RUNNING)),
        ("error", Ending(exit_code=1, slurm=RUNNING, **LATE)),
        ("bad_node", Ending(exit_code=77, slurm=RUNNING)),
        (
            "preempted",
            Ending(exit_code=85, slurm=RUNNING | {"PreemptTime": "2001"}, started=2000.5),
        ),
        # Saving took longer than the grace time: Slurm has queued it again already.
        (
            "preempted",
            Ending(
                exit_code=85,
                slurm={"JobState": "PENDING", "Restarts": "1", "PreemptTime": "2001"},
                started=2000.0,
            ),
        ),
        # Slurm killed a rank while it was still starting: nothing was lost but the start.
        ("preempted", Ending(exit_code=140, slurm=RUNNING | {"PreemptTime": "2001"})),
        ("signalled", Ending(exit_code=140, slurm=RUNNING)),
        (
            "signalled",
            Ending(exit_code=85, slurm=RUNNING, elapsed_s=5, limit_s=3600, signal_delay_s=120),
        ),
        ("timeout", Ending(exit_code=85, slurm=RUNNING, **LATE)),
        (
            "timeout",
            Ending(exit_code=85, slurm=RUNNING, elapsed_s=3421, limit_s=3600, signal_delay_s=120),
        ),
        # Steps are long: the trainer saved before Slurm warned it.
        (
            "timeout",
            Ending(exit_code=85, stop_request="TIME", slurm=RUNNING, elapsed_s=1800, limit_s=3600),
        ),
        # One rank saved and left first, srun ended the others: the trainer's own note decides.
        ("timeout", Ending(exit_code=137, stop_request="USR2", slurm=RUNNING, **LATE)),
        (
            "timeout",
            Ending(exit_code=85, slurm={"JobState": "COMPLETING"}, elapsed_s=3605, limit_s=3600),
        ),
        (
            "requeued",
            Ending(exit_code=85, slurm={"JobState": "COMPLETING", "Restarts": "1"}, restarts=0),
        ),
        (
            "requeued",
            Ending(exit_code=85, slurm={"JobState": "PENDING", "Restarts": "3"}, restarts=2),
        ),
        (
            "cancelled",
            Ending(exit_code=85, slurm={"JobState": "COMPLETING", "Restarts": "0"}, limit_s=3600),
        ),
        ("out_of_memory", Ending(exit_code=137, slurm={"JobState": "OUT_OF_MEMORY"})),
        ("error", Ending(exit_code=137, slurm=RUNNING)),
        # Ranks that save within the blink in which Slurm's signal is still on its way.
        (
            "signalled",
            Ending(exit_code=85, slurm=RUNNING | {"JobState": "SIGNALING"}, limit_s=3600),
        ),
        ("timeout", Ending(exit_code=85, slurm=RUNNING | {"JobState": "SIGNALING"}, **LATE)),
        ("signalled", Ending(exit_code=85, slurm=None, elapsed_s=5, limit_s=3600)),
    ],
)
def test_cause(cause: str, ending: Ending) -> None:
    assert cause_of(ending) == cause


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("PREEMPTED", "preempted"),
        ("TIMEOUT", "timeout"),
        ("NODE_FAIL", "node_failure"),
        ("CANCELLED by 0", "cancelled"),
        ("OUT_OF_MEMORY", "out_of_memory"),
        ("FAILED", "error"),
        ("REQUEUED", "requeued"),
        ("CANCELLED+", "cancelled"),
    ],
)
def test_cause_of_an_attempt_without_a_record(state: str, cause: str) -> None:
    assert cause_of_lost(state) == cause


@pytest.mark.parametrize("cause", ["error", "cancelled", "out_of_memory", "done", "unheard-of"])
def test_never_queued_again(cause: str) -> None:
    budgets = {"preempted": None, "timeout": 9, "node_failure": 9, "bad_node": 9}
    assert decide(cause, [], budgets).requeue is False


def test_budgets_are_counted_by_cause() -> None:
    budgets = {"preempted": None, "timeout": 2, "bad_node": 1}
    assert decide("preempted", ["preempted"] * 500, budgets).requeue
    assert decide("timeout", ["preempted"] * 9 + ["timeout"], budgets).requeue
    used_up = decide("timeout", ["timeout", "preempted", "timeout"], budgets)
    assert not used_up.requeue and "budget of 2" in used_up.why
    assert not decide("bad_node", ["bad_node"], budgets).requeue


def test_the_line_for_the_shell_holds_only_harmless_words() -> None:
    line = decide("bad_node", [], {"bad_node": None}, ["n1", "n2; reboot", "n1"]).line()
    assert line == "requeue bad_node n1"


def test_scontrol_output() -> None:
    seen = parse_show_job(
        "JobId=7 JobName=a b=c JobState=RUNNING Reason=None\n   PreemptTime=None Restarts=2 "
    )
    assert (seen["JobState"], seen["Restarts"], seen["PreemptTime"]) == ("RUNNING", "2", "None")
