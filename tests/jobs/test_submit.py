"""What a launch does besides submitting: show, ask, wait."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import ledger
from jobs.hydra_entry import launch_on_slurm
from jobs.records import append_line
from tests.jobs.conftest import point, put, put_fake
from trainer.base.errors import UserError


def test_a_dry_run_shows_the_exact_scripts_and_writes_nothing(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    points = [point(0), point(1, trainer__n_gpus_per_node=2)]
    given = {"ledger": str(tmp_path / "l"), "timeout_min": 90}
    assert launch_on_slurm(points, {**given, "dry_run": True}, tmp_path / "sweep") == 0
    shown = capsys.readouterr().out
    assert "at most 4.5 GPU-hours" in shown and shown.count("#!/bin/bash") == 2
    assert (
        not (tmp_path / "sweep").exists()
        and not (tmp_path / "l").exists()
        and not list(fake.glob("script*"))
    )
    launch_on_slurm(points, given, tmp_path / "sweep")
    for number in range(2):  # the same, but for the names that a launch makes up
        script = (fake / f"script{number}").read_text()
        assert [
            line for line in script.splitlines() if "#SBATCH" in line and "output" not in line
        ] == [
            line
            for line in shown.split("=====\n")[1 + number].splitlines()
            if "#SBATCH" in line and "output" not in line
        ]


def test_check_asks_slurm_about_every_script(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"ledger": str(tmp_path / "l"), "check": True}
    assert (
        launch_on_slurm([point(0), point(1, trainer__n_gpus_per_node=2)], given, tmp_path / "sweep")
        == 0
    )
    assert (
        capsys.readouterr().out.count("Job 7 to start at noon") == 2
        and not (tmp_path / "sweep").exists()
    )
    (fake / "refuse").write_text("Invalid qos specification")
    with pytest.raises(UserError, match="would refuse this job: sbatch: error: Invalid qos"):
        launch_on_slurm([point(0)], given, tmp_path / "sweep")


def test_a_controller_that_is_not_reached_is_said_before_anything_is_claimed(
    fake: Path, tmp_path: Path
) -> None:
    put_fake(fake, "scontrol", 'echo "scontrol: fatal: no configuration source" >&2; exit 1')
    given = {"ledger": str(tmp_path / "l")}
    for asked in ({}, {"check": True}):
        with pytest.raises(UserError, match=r"isn't reached from this machine \(scontrol: fatal"):
            launch_on_slurm([point(0)], given | asked, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists() and not (tmp_path / "l").exists()
    assert launch_on_slurm([point(0)], given | {"dry_run": True}, tmp_path / "sweep") == 0


def test_wait_shows_the_errors_of_every_failed_job(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs end while the first look at the queue is taken; one look fails."""
    book = tmp_path / "l"
    put(
        tmp_path / "bin",
        "squeue",
        f'[ -e {tmp_path}/ended ] || {{ echo "Socket timed out" >&2; exit 1; }}',
    )

    def end_all(seconds: float) -> None:
        for entry in ledger.read(book):
            run, cause = Path(entry.run), "done" if entry.name.endswith("/1") else "error"
            (run / "logs/attempt_1").mkdir(parents=True, exist_ok=True)
            (run / "logs/attempt_1/rank_0.log").write_text(f"ValueError: {entry.name} is broken\n")
            line = {
                "attempt": 1,
                "launch": entry.launch,
                "cause": cause,
                "why": cause,
                "requeue": False,
            }
            append_line(run / "attempts.jsonl", line)
        (tmp_path / "ended").touch()

    monkeypatch.setattr("jobs.view.watch.time", SimpleNamespace(sleep=end_all))
    points = [point(n, trainer__seed=n) for n in range(3)]
    assert launch_on_slurm(points, {"ledger": str(book), "wait": True}, tmp_path / "sweep") == 1
    shown = capsys.readouterr()
    assert "squeue failed: Socket timed out. Asking again." in shown.err
    assert (
        "ValueError: sweep/0 is broken" in shown.err
        and "ValueError: sweep/2 is broken" in shown.err
    )
    assert "sweep/1" not in shown.err and shown.out.count("COMPLETED") == 1
    assert [json.loads(line)["phase"] for line in book.read_text().splitlines()] == [
        "planned"
    ] * 3 + ["submitted"] * 3


def test_ctrl_c_while_waiting_says_that_the_jobs_go_on(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jobs.view.watch.wait_for", interrupted)
    given = {"ledger": str(tmp_path / "l"), "wait": True}
    assert launch_on_slurm([point(0)], given, tmp_path / "sweep") == 130
    shown = capsys.readouterr().out
    assert "what was submitted goes on in Slurm" in shown
    assert f"python -m jobs --ledger {tmp_path}/l status sweep" in shown
    assert f"python -m jobs --ledger {tmp_path}/l cancel sweep" in shown
    assert not (fake / "calls").exists()  # nothing was cancelled
