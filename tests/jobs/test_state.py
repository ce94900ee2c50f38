"""What a run's row says, from the queue, accounting and the run's own records: never LOST while an
answer is due.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import ledger
from jobs.__main__ import main
from jobs.evidence import read_evidence, states_of
from jobs.ledger import Entry
from jobs.records import append_line
from jobs.run_state import GRACE_S, FolderEvidence, state_of
from jobs.slurm import JobInfo, Slurm, tasks_of
from tests.jobs.conftest import put
from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.processes import process_start

NOW = 1_000_000.0
ENTRY = Entry(
    name="s/3",
    sweep="s",
    run="/r",
    signature="x",
    overrides=(),
    shape="1n1g",
    gpus=1,
    launch="L",
    phase="submitted",
    job="7_3",
    time=NOW - 9000,
)


def line(cause: str, requeue: bool = False) -> dict[str, object]:
    return {"attempt": 1, "launch": "L", "cause": cause, "why": f"{cause}: so", "requeue": requeue}


OPEN = FolderEvidence(attempts=(), begun=1, last_write=NOW - 5)
SILENT = FolderEvidence(attempts=(), begun=1, last_write=NOW - GRACE_S - 5)


@pytest.mark.parametrize(
    ("evidence", "queue", "accounting", "state", "reason"),
    [
        # It has left the queue, and accounting lags: neither lost nor ended.
        (OPEN, None, None, "ENDING", "left Slurm's queue; no record yet"),
        (OPEN, None, "RUNNING", "ENDING", "left Slurm's queue"),
        (OPEN, "COMPLETED", None, "ENDING", "left Slurm's queue"),
        (OPEN, None, "CANCELLED", "CANCELLED", "cancelled"),
        (OPEN, "CANCELLED", None, "CANCELLED", "cancelled"),
        (OPEN, None, "FAILED", "FAILED", "Slurm says FAILED; the batch script left no record"),
        (OPEN, "RUNNING", None, "RUNNING", "n1"),
        # python -m jobs cancel has said so itself, long ago or not.
        (
            FolderEvidence(attempts=(), begun=0, cancelled=True),
            None,
            None,
            "CANCELLED",
            "cancelled",
        ),
        (FolderEvidence(attempts=(), begun=0, cancelled=True), "PENDING", None, "PENDING", ""),
        # A task that was cancelled in the queue leaves no trace, but its array does.
        (
            FolderEvidence(attempts=(), begun=0, launch_begun=False),
            "sibling",
            None,
            "CANCELLED",
            "cancelled before it started",
        ),
        (
            FolderEvidence(attempts=(), begun=0, launch_begun=False),
            None,
            None,
            "LOST",
            "Slurm doesn't know this job",
        ),
        # Nobody knows it, and it has shown no sign of life for long.
        (SILENT, None, None, "LOST", "Slurm doesn't know this job"),
        (SILENT, None, "RUNNING", "LOST", "Slurm says RUNNING; the batch script left no record"),
        (
            SILENT,
            None,
            "COMPLETED",
            "LOST",
            "Slurm says COMPLETED; the batch script left no record",
        ),
        # An attempt that was to be queued again, and is not: its budget is not used up.
        (
            FolderEvidence(attempts=(line("preempted", True),), begun=1, last_write=NOW - 5),
            None,
            None,
            "ENDING",
            "left",
        ),
        (
            FolderEvidence(attempts=(line("preempted", True),), begun=1),
            None,
            None,
            "LOST",
            "python -m jobs resubmit s/3",
        ),
        (
            FolderEvidence(attempts=(line("preempted", True),), begun=1),
            None,
            "CANCELLED",
            "CANCELLED",
            "preempted: so",
        ),
        (
            FolderEvidence(attempts=(line("preempted", True),), begun=1),
            "PENDING",
            None,
            "PENDING",
            "",
        ),
        (
            FolderEvidence(attempts=(line("preempted"),), begun=1),
            None,
            None,
            "EXHAUSTED",
            "preempted: so",
        ),
        (
            FolderEvidence(attempts=(line("cancelled"),), begun=1),
            None,
            None,
            "CANCELLED",
            "cancelled: so",
        ),
        # An older attempt's line says nothing about the one that runs.
        (
            FolderEvidence(attempts=(line("preempted", True),), begun=2),
            "RUNNING",
            None,
            "RUNNING",
            "n1",
        ),
        (FolderEvidence(attempts=(line("done"),), begun=1), "RUNNING", None, "COMPLETED", ""),
        (FolderEvidence(attempts=(line("crash"),), begun=1), None, "COMPLETED", "FAILED", "so"),
        (SILENT, None, "COMPLETED", "LOST", "Slurm says COMPLETED; the batch script left no"),
        # Rank 0 has finished; the batch script could not write the attempt's line.
        (replace(SILENT, finished=True), None, "FAILED", "COMPLETED", "left no record"),
        (replace(SILENT, finished=True), "COMPLETING", None, "COMPLETING", ""),
        (
            replace(SILENT, finished=True, launch_begun=False),
            None,
            "FAILED",
            "FAILED",
            "Slurm says FAILED",
        ),
    ],
)
def test_state(
    evidence: FolderEvidence, queue: str | None, accounting: str | None, state: str, reason: str
) -> None:
    held = (
        {"7_3": JobInfo(state=queue, nodes="n1" if queue == "RUNNING" else "", reason="None")}
        if queue
        else {}
    )
    held = {"7_4": JobInfo(state="PENDING")} if queue == "sibling" else held
    known = {"7_3": JobInfo(state=accounting)} if accounting else {}
    found = state_of(ENTRY, evidence, held, known, now=NOW)
    assert found.state == state and reason in found.reason


@pytest.fixture
def run(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Entry:
    folder = tmp_path / "run"
    (folder / "logs/attempt_1").mkdir(parents=True)
    entry = Entry(**{**vars(ENTRY), "run": str(folder), "time": time.time() - 9000})
    ledger.append(tmp_path / "ledger.jsonl", [entry])
    monkeypatch.setenv("PLIMSOLL_LEDGER", str(tmp_path / "ledger.jsonl"))
    return entry


def test_a_cancelled_run_is_cancelled_at_once(
    run: Entry, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake / "squeue").write_text("9|7|3|RUNNING|None|n1\n")
    assert main(["cancel", "s/3"]) == 0
    (fake / "squeue").unlink()  # the queue forgets it at once, accounting has never heard of it
    assert states_of([run], Slurm())[run.run].state == "CANCELLED"
    resubmitted = Entry(
        **{**vars(run), "launch": "M"}
    )  # what was cancelled was the launch, not the run
    assert not read_evidence(resubmitted).cancelled


def test_a_run_that_ended_between_two_reads_is_not_lost(
    run: Entry, fake: Path, tmp_path: Path
) -> None:
    """Its record is written after the first look at its folder and before Slurm is asked."""
    record = '{"attempt":1,"launch":"L","cause":"done","why":"finished"}'
    put(tmp_path / "bin", "squeue", f"echo '{record}' >> {run.run}/attempts.jsonl")
    assert states_of([run], Slurm())[run.run].state == "COMPLETED"


def test_a_slurm_that_is_away_loses_nothing(
    run: Entry, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(
        tmp_path / "bin",
        "squeue",
        'echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1',
    )
    with pytest.raises(UserError, match="Unable to contact slurm controller"):
        states_of([run], Slurm())
    assert main(["status"]) == 0  # what the folders say is still worth a look
    shown = capsys.readouterr()
    assert "UNKNOWN" in shown.out and "Unable to contact" in shown.err
    assert main(["resubmit", "s/3"]) == 2  # but nothing is started on a guess
    put(
        tmp_path / "bin",
        "squeue",
        'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1',
    )
    assert states_of([run], Slurm())[run.run].state == "LOST"


def test_without_slurm_on_this_machine(
    run: Entry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert states_of([run], Slurm())[run.run].state == "UNKNOWN"
    append_line(Path(run.run) / "attempts.jsonl", line("error"))
    assert states_of([run], Slurm())[run.run].state == "FAILED"


@pytest.mark.parametrize(
    ("pid", "shift", "state"),
    [(os.getpid(), 0, "RUNNING"), (os.getpid(), 1, "LOST"), (2**22 + 1, 0, "LOST")],
    ids=["alive", "another by that number", "gone"],  # the same in every process of the suite
)
def test_a_local_run_lives_as_long_as_its_process(
    run: Entry, pid: int, shift: int, state: str
) -> None:
    entry = Entry(**{**vars(run), "job": "local"})
    begin = {"nodes": os.uname().nodename, "pid": pid, "pid_start": process_start(pid) + shift}
    atomic.write_json(Path(run.run) / "logs/attempt_1/begin.json", begin)
    assert states_of([entry], Slurm())[run.run].state == state


def test_tasks_that_never_started_are_one_row_in_sacct(run: Entry, fake: Path) -> None:
    assert tasks_of("7_[0-2,5%4]") == ["7_0", "7_1", "7_2", "7_5"] and tasks_of("7_3") == ["7_3"]
    (fake / "sacct").write_text("7_[1-4%256]|CANCELLED by 0|None assigned|None\n")
    assert states_of([run], Slurm())[run.run].state == "CANCELLED"
