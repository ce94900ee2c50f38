"""Who owns a run folder: a queued job does, and nothing of it changes until its end is known."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import ledger
from jobs.__main__ import main
from jobs.attempt.bookkeeping import begin
from jobs.attempt.decision import Decision
from jobs.evidence import states_of
from jobs.hydra_entry import launch_here, launch_on_slurm
from jobs.records import append_line, attempts
from jobs.slurm import Slurm
from jobs.submit.launch import Point
from tests.jobs.conftest import calls, point, put, until
from trainer.__main__ import run_on_this_machine
from trainer.base import atomic, run_owner
from trainer.base.errors import UserError
from trainer.base.processes import process_start
from trainer.base.run_owner import LOCAL, Owner, owner_of

PENDING = "100|100|0|PENDING|Priority|\n"


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The ledger."""
    path = tmp_path / "ledger.jsonl"
    monkeypatch.setenv("PLIMSOLL_LEDGER", str(path))
    return path


def into(run: Path, lr: float) -> Point:
    """A point that names its run folder."""
    return point(
        0,
        f"trainer.default_local_dir={run}",
        f"actor_rollout_ref.actor.optim.lr={lr}",
        trainer__default_local_dir=str(run),
        actor_rollout_ref__actor__optim__lr=lr,
    )


def contents(*folders: Path) -> dict[str, str]:
    """All files of some folders."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return {str(path): path.read_text() for path in files}


def launch(book: Path, sweep: Path, *points: Point, **options: Any) -> int:
    return launch_on_slurm(points, {"ledger": str(book), **options}, sweep)


def fail(run: Path) -> None:
    """The run's newest launch has begun an attempt, which ended with an error."""
    record = json.loads((run / "job.json").read_text())
    number = begin(
        run, job="100_0", nodes="n1", restarts=0, sacct="", now=1.0, launch=record["launch"]
    )
    line = {"attempt": int(number), "launch": record["launch"], "cause": "error", "why": "error"}
    append_line(run / "attempts.jsonl", line | {"requeue": False})


def submissions(fake: Path) -> int:
    return len(list(fake.glob("script*")))


@pytest.fixture
def queued(fake: Path, tmp_path: Path, book: Path) -> Path:
    """The folder of a run whose job is queued."""
    run = tmp_path / "x"
    assert launch(book, tmp_path / "first", into(run, 1e-4)) == 0
    (fake / "squeue").write_text(PENDING)
    return run


def test_a_queued_job_owns_its_folder(
    queued: Path, fake: Path, tmp_path: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(queued) | {str(book): book.read_text()}
    for options in ({}, {"resubmit": "always"}, {"dry_run": True}):
        with pytest.raises(UserError) as caught:
            launch(book, tmp_path / "second", into(queued, 5e-3), **options)
        said = str(caught.value)
        assert "belongs to first/0 (Slurm job 100_0, launched 2" in said and "it is PENDING" in said
        assert "python -m jobs cancel first/0" in said and "trainer.default_local_dir" in said
    assert contents(queued) | {str(book): book.read_text()} == before
    assert submissions(fake) == 1 and not (tmp_path / "second").exists()
    capsys.readouterr()
    assert main(["status", "--json", str(queued)]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "PENDING"
    assert main(["cancel", str(queued)]) == 0 and calls(fake) == "scancel 100_0\n"
    (fake / "squeue").write_text("")  # cancelled: now the folder is free, and says the new value
    assert launch(book, tmp_path / "second", into(queued, 5e-3)) == 0
    assert "lr: 0.005" in (queued / "config.yaml").read_text()


def test_the_same_command_again_is_told_that_it_is_queued(
    queued: Path, fake: Path, tmp_path: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(book, tmp_path / "second", into(queued, 1e-4)) == 0
    assert "launched before as first/0 (PENDING, Slurm job 100_0)" in capsys.readouterr().out
    assert submissions(fake) == 1


def test_nobody_on_this_machine_gets_the_folder_of_a_queued_job(
    queued: Path, tmp_path: Path, book: Path
) -> None:
    """Neither ``python -m trainer`` nor the local launcher, with whatever ledger."""
    before = contents(queued)
    with pytest.raises(UserError, match=r"belongs to first/0 .* it is PENDING"):
        run_on_this_machine(settings_of(into(queued, 5e-3)))
    with pytest.raises(UserError, match=r"belongs to first/0 .* it is PENDING"):
        launch_here([into(queued, 5e-3)], {"ledger": str(tmp_path / "other")}, tmp_path / "s")
    assert contents(queued) == before


def settings_of(one: Point) -> dict[str, Any]:
    return {key: value for key, value in one.config.items() if key not in ("cluster", "container")}


def test_without_slurms_answer_nothing_is_guessed(
    queued: Path, fake: Path, tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(queued)
    put(tmp_path / "bin", "squeue", 'echo "Unable to contact slurm controller" >&2; exit 1')
    with pytest.raises(UserError, match=r"(?s)whether that job lives .* Unable to contact"):
        run_on_this_machine(settings_of(into(queued, 5e-3)))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    with pytest.raises(UserError, match="there is no Slurm on this machine to ask"):
        run_on_this_machine(settings_of(into(queued, 5e-3)))
    assert contents(queued) == before
    fail(queued)  # what its own record says is enough
    monkeypatch.setenv("PLIMSOLL_WORKER_MODULE", "tests.jobs.standin")
    monkeypatch.setenv("STANDIN_STEP_S", "0")
    assert run_on_this_machine(settings_of(into(queued, 5e-3))) == 0


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this machine."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.communicate(timeout=100)


def test_a_command_that_is_refused_changes_nothing_of_the_run_that_lives(
    tmp_path: Path,
    stranger: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    fake: Path,
    book: Path,
) -> None:
    """The folder of ``python -m trainer`` while it lives, and once it was killed."""
    monkeypatch.setenv("PLIMSOLL_WORKER_MODULE", "tests.jobs.standin")
    monkeypatch.setenv("STANDIN_STEP_S", "0")
    run = tmp_path / "x"
    assert run_on_this_machine(settings_of(into(run, 1e-4))) == 0
    owner = owner_of(run)
    assert owner is not None and owner.ended > 0
    pid = stranger.pid
    lives = vars(owner) | {"ended": 0.0, "pid": pid, "pid_start": process_start(pid)}
    atomic.write_json(run / "owner.json", lives)
    before = contents(run)
    for start in (
        lambda: run_on_this_machine(settings_of(into(run, 5e-3))),
        lambda: launch(book, tmp_path / "s", into(run, 5e-3)),
        lambda: launch_here([into(run, 5e-3)], {"ledger": str(book)}, tmp_path / "s"),
    ):
        with pytest.raises(UserError, match=rf"python -m trainer \(process {pid} .* it runs"):
            start()
    assert contents(run) == before and submissions(fake) == 0
    atomic.write_json(run / "owner.json", lives | {"pid_start": 1})
    assert run_on_this_machine(settings_of(into(run, 1e-4))) == 0


def test_a_launch_that_died_before_sbatch_doesnt_block_the_folder(
    fake: Path, tmp_path: Path, book: Path
) -> None:
    run = tmp_path / "x"
    run.mkdir()
    owner = run_owner.new_owner("old", run_owner.SLURM, "s/0")
    atomic.write_json(run / "owner.json", vars(owner) | {"pid_start": 1})
    assert launch(book, tmp_path / "s", into(run, 1e-4)) == 0
    taken = owner_of(run)
    assert taken is not None and (taken.job, taken.launch != "old") == ("100_0", True)


def resubmit(run: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "jobs", "resubmit", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def opened(gate: Path) -> bool:
    """Let the process go on that waits at the gate; False while none does."""
    try:
        descriptor = os.open(gate, os.O_WRONLY | os.O_NONBLOCK)
    except OSError as error:
        assert error.errno == errno.ENXIO  # nobody reads it yet
        return False
    os.write(descriptor, b"go\n")
    os.close(descriptor)
    return True


def test_two_resubmits_at_once_submit_once(queued: Path, fake: Path, tmp_path: Path) -> None:
    """The second never reaches sbatch: not while the first is there, and not when it is back."""
    fail(queued)
    (fake / "squeue").write_text("")
    gate = fake / "gate"
    os.mkfifo(gate)
    sbatch = tmp_path / "bin/sbatch"
    # sbatch waits until the other resubmit has ended. Variables do not reach it: the path is given.
    wait = f"read < {shlex.quote(str(gate))}"
    sbatch.write_text(sbatch.read_text().replace("\n", f"\n{wait}\n", 1))
    first, second = resubmit(queued), resubmit(queued)
    loser, winner = first, second
    while first.poll() is None and second.poll() is None:
        try:
            first.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    if second.poll() is not None:
        loser, winner = second, first
    assert loser.wait(100) == 2
    assert "first/0" in loser.communicate()[1]
    until(lambda: opened(gate) or winner.poll() is not None, 100)
    out, err = winner.communicate(timeout=100)
    assert winner.returncode == 0, err
    assert "resubmitted 1 run(s): first/0" in out and submissions(fake) == 2
    gate.unlink()
    third = resubmit(queued)
    out, _ = third.communicate(timeout=100)
    assert "left alone first/0: ENDING" in out and submissions(fake) == 2


def test_only_the_owner_begins_an_attempt(
    queued: Path, fake: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job that was thought lost is back while another launch trains: nothing of it is closed."""
    (old,) = ledger.read(book)
    fail(queued)
    (fake / "squeue").write_text("")
    assert main(["resubmit", str(queued)]) == 0
    (new,) = ledger.read(book)
    arguments = {"job": "101_0", "nodes": "n1", "restarts": 0, "sacct": "", "now": 9.0}
    assert begin(queued, launch=new.launch, **arguments) == "2"
    before = contents(queued)
    assert begin(queued, launch=old.launch, **(arguments | {"job": "100_0"})) == "stop"
    why = f"this job's launch {old.launch} doesn't own {queued} any more: first/0 (Slurm job 101_0"
    assert why in capsys.readouterr().err
    after = contents(queued)
    assert why in after.pop(str(queued / "refused.jsonl")) and after == before
    assert [line["attempt"] for line in attempts(queued)] == [1]
    # The same job again after a node failure closes what it lost.
    sacct = "NODE_FAIL|0:0|n1|20\n"
    assert begin(queued, launch=new.launch, **(arguments | {"sacct": sacct})) == "3"
    states = states_of([old], Slurm())
    assert states[old.run].state == "FAILED" and why in states[old.run].reason


def test_the_jobs_of_a_local_sweep_own_their_folders_until_each_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While job 0 runs job 1 is queued; then job 0's folder is free, though the sweep goes on."""
    seen: list[dict[int, Owner | None]] = []
    runs = [tmp_path / f"r{n}" for n in range(2)]

    def look(*_: object) -> Decision:
        seen.append({n: owner_of(run) for n, run in enumerate(runs)})
        return Decision(requeue=False, cause="done", why="finished")

    monkeypatch.setattr("jobs.submit.local._run_job", look)
    points = [
        point(
            n,
            f"trainer.default_local_dir={run}",
            trainer__default_local_dir=str(run),
            trainer__seed=n,
        )
        for n, run in enumerate(runs)
    ]
    assert launch_here(points, {"ledger": str(tmp_path / "l")}, tmp_path / "s") == 0
    held = [
        {
            n: owner is not None and owner.kind == LOCAL and not owner.ended
            for n, owner in look.items()
        }
        for look in seen
    ]
    assert held == [{0: True, 1: True}, {0: False, 1: True}]
    assert all(owner_of(run).ended for run in runs)  # type: ignore[union-attr]


def test_a_second_array_refused(
    fake: Path, tmp_path: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was submitted is said with its ids, and the rest can be submitted later."""
    sbatch = tmp_path / "bin/sbatch"
    good = sbatch.read_text()
    first = shlex.quote(str(fake / "script0"))  # variables do not reach sbatch
    refuse = f'[ ! -e {first} ] || {{ echo "sbatch: error: QOSMaxSubmitJob" >&2; exit 1; }}'
    sbatch.write_text(good.replace("\n", f"\n{refuse}\n", 1))
    points = [point(n, trainer__n_gpus_per_node=2**n) for n in range(3)]
    with pytest.raises(UserError) as caught:
        launch(book, tmp_path / "s", *points)
    said = str(caught.value)
    assert "sbatch refused array 001-1n2g" in said and "QOSMaxSubmitJob" in said
    assert "going on: s/0 as Slurm array(s) 100; python -m jobs cancel 100 ends them" in said
    assert "Not submitted: s/1, s/2" in said and "python -m jobs resubmit s/1 s/2" in said
    (fake / "squeue").write_text(PENDING)
    sbatch.write_text(good)
    capsys.readouterr()
    assert main(["resubmit", "s"]) == 0
    shown = capsys.readouterr().out
    assert "left alone s/0: PENDING" in shown and "resubmitted 2 run(s): s/1, s/2" in shown
    assert submissions(fake) == 3


@pytest.mark.parametrize("name", ["it's here", 'a "b" $HOME', "plain"])
def test_a_resubmitted_script_is_the_first_ones_for_the_runs_of_its_own(
    fake: Path, tmp_path: Path, book: Path, name: str
) -> None:
    sweep = tmp_path / name
    assert launch(book, sweep, *(point(n, trainer__seed=n) for n in range(3))) == 0
    last = Path(ledger.read(book)[2].run)
    fail(last)
    assert main(["resubmit", str(last)]) == 0
    entry = next(entry for entry in ledger.read(book) if entry.run == str(last))
    first, second = ((fake / f"script{n}").read_text() for n in range(2))
    head = subprocess.run(
        ["bash", "-c", f'{_assignments(second)}\ncat "$FOLDER/runs.txt"; echo $PLIMSOLL_LAUNCH'],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert head.stdout.splitlines() == [str(last), entry.launch]
    assert "#SBATCH --array=0-0%1\n" in second

    def rest(text: str) -> list[str]:
        skipped = ("#SBATCH --array", "#SBATCH --output", "FOLDER=", "export PLIMSOLL_LAUNCH")
        return [line for line in text.splitlines() if not line.startswith((*skipped, "srun --unb"))]

    assert rest(first) == rest(second)


def _assignments(script: str) -> str:
    return "\n".join(
        line for line in script.splitlines() if line.startswith(("FOLDER=", "export P"))
    )


@pytest.mark.parametrize(
    ("dependency", "queue", "kept"),
    [
        ("afterok:7:8_1", "", False),
        ("afterok:7:8_1", "9|8|1|PENDING|Priority|\n", True),
        ("singleton", "", True),
    ],
)
def test_a_resubmit_waits_only_for_what_has_not_ended(
    fake: Path, tmp_path: Path, book: Path, dependency: str, queue: str, kept: bool
) -> None:
    assert launch(book, tmp_path / "s", point(0), dependency=dependency) == 0
    fail(Path(ledger.read(book)[0].run))
    (fake / "squeue").write_text(queue)
    assert main(["resubmit", "s/0"]) == 0
    line = f"#SBATCH --dependency={dependency}\n"
    assert line in (fake / "script0").read_text()
    assert (line in (fake / "script1").read_text()) is kept
