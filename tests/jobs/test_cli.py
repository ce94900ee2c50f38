"""``python -m jobs`` over a ledger and run folders, with a fake Slurm."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jobs import ledger
from jobs.__main__ import main
from jobs.evidence import states_of
from jobs.ledger import Entry
from jobs.records import append_line
from jobs.slurm import Slurm
from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.launch import jobs_of
from jobs.submit.plan import Job, make_plan
from jobs.submit.report import plan_text
from jobs.submit.shape import Shape
from jobs.view.select import select
from jobs.view.table import table_of
from tests.jobs.conftest import calls, point
from trainer.base.errors import UserError
from trainer.base.run_folder import send_command, upload_command

ROOT = Path(__file__).parents[2]
SHAPE = Shape(nodes=1, ranks_per_node=1, gpus_per_node=1, cluster=Cluster(), container=Container())


def entry(root: Path, index: int, **values: object) -> Entry:
    run = root / f"run{index}"
    (run / "logs/attempt_1").mkdir(parents=True, exist_ok=True)
    known = {
        "name": f"s/{index}",
        "sweep": "s",
        "run": str(run),
        "signature": str(index),
        "shape": "1n1g",
        "gpus": 1,
        "overrides": ("a.lr=1", f"b.c.seed={index}"),
        "launch": "L",
        "phase": "submitted",
        "job": f"100_{index}",
    }
    return Entry(**(known | values))


@pytest.fixture
def ledger_file(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs: completed, failed, pending, unknown to Slurm."""
    path = tmp_path / "ledger.jsonl"
    monkeypatch.setenv("PLIMSOLL_LEDGER", str(path))
    entries = [entry(tmp_path, n) for n in range(4)]
    ledger.append(path, entries)
    for number, cause, why in ((0, "done", "finished"), (1, "error", "error: as before")):
        line = {"attempt": 1, "launch": "L", "cause": cause, "why": why}
        append_line(Path(entries[number].run) / "attempts.jsonl", line)
    (fake / "squeue").write_text("102|100|2|PENDING|Priority|\n")
    for number in (0, 1):
        rows = [{"step": s, "critic/score/mean": s / 10 + number} for s in range(1, 4 - number)]
        (Path(entries[number].run) / "metrics.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in rows)
        )
    return path


def test_status(ledger_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    rows = {
        r["name"]: (r["state"], r["reason"])
        for r in map(json.loads, capsys.readouterr().out.splitlines())
    }
    assert rows == {
        "s/0": ("COMPLETED", ""),
        "s/1": ("FAILED", "error: as before"),
        "s/2": ("PENDING", "Priority"),
        "s/3": ("LOST", "Slurm doesn't know this job"),
    }
    main(["status"])
    table = capsys.readouterr().out
    assert "seed=1" in table and "lr=1" not in table  # only what differs
    assert "0.3" in table


@pytest.mark.parametrize(
    "words", [["s/1"], ["100_1"], ["{tmp}/run1"], ["--state", "failed"], ["s", "--state", "FAILED"]]
)
def test_selection(words: list[str], ledger_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["status", "--json", *(w.replace("{tmp}", str(ledger_file.parent)) for w in words)])
        == 0
    )
    assert [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()] == ["s/1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "s/9"], "'s/9' names no run of the ledger; did you mean 's/"),
        (["logs", "s"], "logs shows one run, and this names 4"),
        (["logs", "s/0"], "there are: no logs yet"),
        (["cancel"], "needs to know what"),
        (["resubmit"], "needs to know what"),
        (["resubmit", "s/1"], "no batch script"),
        (["compare", "s/0", "--metric", "critic/scores/mean"], "did you mean 'critic/score/mean'"),
        (["sync", "s/0"], "these runs have nothing to send"),
        (["status", "--state", "runing"], "no state; did you mean 'running'? there are pending, "),
        (["--ledger", "{tmp}", "status"], "can't be read (Is a directory)"),
        (["--ledger", "/nowhere", "status"], "the ledger /nowhere isn't there (looked from "),
    ],
)
def test_wrong_input(
    words: list[str], message: str, ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.replace("{tmp}", str(ledger_file.parent)) for word in words]) == 2
    assert message in capsys.readouterr().err


def test_cancel_ends_only_what_lives(
    ledger_file: Path, fake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cancel", "s"]) == 0
    assert calls(fake) == "scancel 100_2\n"
    said = capsys.readouterr().out
    assert "left alone s/0: COMPLETED\n" in said and "cancelled 1 run(s): s/2\n" in said


def test_the_table_on_a_narrow_terminal_and_in_a_pipe(
    ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name can be copied from it, a failed run says its last words, and a pipe gets neither
    colours nor folds.
    """
    (ledger_file.parent / "run1/logs/attempt_1/rank_0.log").write_text(
        "step 1\nRuntimeError: on fire\n"
    )
    entries = select(ledger.read(ledger_file), [])
    table = table_of(entries, states_of(entries, Slurm()), 60)
    narrow = io.StringIO()
    Console(file=narrow, width=60, no_color=True).print(table)
    assert (
        all(f"\ns/{n} " in narrow.getvalue() for n in range(4)) and "COMPLETED" in narrow.getvalue()
    )
    assert "tok/s" not in narrow.getvalue()  # no run has it
    main(["status"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and "\x1b" not in "".join(lines) and "RuntimeError: on fire" in lines[2]


def test_at_80_columns_state_step_reward_and_speed_are_whole(
    ledger_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run without siblings shows all its overrides; no other run loses its columns to it."""
    long = tuple(f"actor_rollout_ref.actor.some_long_key_{n}={n}" for n in range(20))
    folder = ledger_file.parent / "alone"
    alone = replace(
        entry_named("a" * 70 + "/0"),
        run=str(folder),
        overrides=long,
        job="local",
        phase="submitted",
    )
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"step": 12345, "critic/score/mean": -0.12345, "perf/throughput": 123456.0}\n'
    )
    ledger.append(ledger_file, [alone])
    monkeypatch.setenv("COLUMNS", "80")
    main(["status"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 6 and max(map(len, lines)) <= 80
    assert all(title in lines[0] for title in ("run", "state", "step", "reward", "tok/s"))
    assert any("COMPLETED" in line for line in lines)
    (row,) = [line for line in lines if line.startswith("…")]
    assert all(text in row for text in ("a/0 ", " 12345 ", " -0.1235 ", "1.235e+05"))


def test_a_run_takes_one_line_a_table_of_metrics_at_80_columns(
    ledger_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"a/very/long/name/of/a/metric_{n}" for n in range(7)]
    for n in range(2):
        text = json.dumps({"step": 2} | {name: 1234567.8 + n for name in names})
        (ledger_file.parent / f"run{n}/metrics.jsonl").write_text(text + "\n")
    monkeypatch.setenv("COLUMNS", "80")
    main(
        [
            "compare",
            "s/0",
            "s/1",
            "--each-run",
            *(word for name in names for word in ("--metric", name)),
        ]
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and sum("s/0" in line for line in lines) == 2
    assert sum(line.count("1.23457e+06") for line in lines) == 14


def test_a_step_that_no_run_has_is_told(
    ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "s/0", "s/1", "--at", "999"]) == 2
    assert "no run has step 999: the newest one is 3" in capsys.readouterr().err


def test_runs_of_a_sweep_stand_in_their_order() -> None:
    names = ["b/10", "a/0", "b/9", "a/1"]
    entries = [entry_named(name) for name in names]
    assert [e.name for e in select(entries, [])] == ["b/9", "b/10", "a/0", "a/1"]


def entry_named(name: str) -> Entry:
    return Entry(
        name=name,
        sweep=name[0],
        run=f"/{name}",
        signature=name,
        shape="1n1g",
        gpus=1,
        overrides=(),
        launch="L",
    )


def test_a_plan_says_once_what_all_jobs_share() -> None:
    jobs = [
        Job(
            index=n,
            overrides=("model=builtin\\:tiny", f"lr={n}"),
            config={},
            run=Path(f"/{n}"),
            shape=SHAPE,
            signature=str(n),
        )
        for n in range(2)
    ]
    text = plan_text(make_plan(jobs, max_array_size=9, resubmit="never"), 60, "s")
    assert text.count("model=builtin:tiny") == 1 and "    0: lr=0\n    1: lr=1\n" in text


def test_a_mistake_shared_by_all_jobs_is_one_message(tmp_path: Path) -> None:
    points = [
        point(n, "trainer.nnodes=0", f"trainer.seed={n}", trainer__nnodes=0, trainer__seed=n)
        for n in range(9)
    ]
    with pytest.raises(
        UserError, match=r"^job 0 \(trainer.seed=0\) and 8 more: .*nnodes"
    ) as caught:
        jobs_of(points, tmp_path)
    assert "job 1" not in str(caught.value)


def test_logs_of_a_run_that_waits(ledger_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (ledger_file.parent / "run2/logs/attempt_1").rmdir()
    assert main(["logs", "s/2"]) == 1
    assert capsys.readouterr().err == "s/2 is PENDING (Priority)\n"


def test_compare_at_the_last_common_step(
    ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", "s/0", "s/1", "--each-run"])
    out = capsys.readouterr().out
    assert "step 2" in out and "0.2" in out and "1.2" in out


@pytest.mark.parametrize(
    ("spelled", "shown"), [('"NaN"', "nan"), ("NaN", "nan"), ('"Infinity"', "inf")]
)
def test_a_diverged_run_is_shown_as_that(
    ledger_file: Path, capsys: pytest.CaptureFixture[str], spelled: str, shown: str
) -> None:
    """Every sweep of the learning rate has a run that diverges: it must not look like one without
    metrics.
    """
    for number, loss in ((0, "0.5"), (1, spelled)):
        record = ledger_file.parent / f"run{number}" / "metrics.jsonl"
        record.write_text(
            f'{{"step": 1, "train/loss": 0.7}}\n'
            f'{{"step": 2, "train/loss": {loss}, "val/reward": {loss}}}\n{{"step": 3, "tr'
        )
    assert main(["compare", "s/0", "s/1", "--each-run", "--metric", "train/loss"]) == 0
    assert [row.split()[-1] for row in capsys.readouterr().out.splitlines()[-2:]] == ["0.5", shown]
    assert main(["status"]) == 0
    assert shown in capsys.readouterr().out


def test_logs_follow_goes_on_to_the_next_attempt(
    ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ledger_file.parent / "run0"
    (run / "logs/attempt_1/rank_0.log").write_text("one\ntwo\n")
    (run / "logs/attempt_2").mkdir()
    (run / "logs/attempt_2/rank_0.log").write_text("three\n")
    assert main(["logs", "s/0", "--attempt", "1", "-n", "1"]) == 0
    assert capsys.readouterr().out == "two\n"
    append_line(run / "attempts.jsonl", {"attempt": 2, "launch": "L", "cause": "done", "why": ""})
    (run / "logs/attempt_2/rank_0.log").rename(run / "later.log")
    writer = threading.Timer(
        0.3, lambda: (run / "later.log").rename(run / "logs/attempt_2/rank_0.log")
    )
    writer.start()
    assert main(["logs", "-f", "s/0"]) == 0
    writer.join()
    assert capsys.readouterr().out.endswith("three\n")


def test_sync_sends_the_records_of_runs_with_loggers(
    ledger_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync", "--dry-run"]) == 2
    assert "these runs have nothing to send" in capsys.readouterr().err
    for number in (0, 2):
        run = ledger_file.parent / f"run{number}"
        (run / "metrics.jsonl").write_text('{"step": 1}\n')
        (run / "wandb.json").write_text("{}")
    assert main(["sync", "--dry-run"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith(f"-m trainer.tracking.rebuild {ledger_file.parent}/run0 --online")
    assert "run2" in second
    assert shlex.split(second)[1:] == upload_command(ledger_file.parent / "run2")[1:]
    # Neither folder has a config.yaml: both are tried, and named.
    assert main(["sync"]) == 1
    assert capsys.readouterr().err.count("sync failed with exit code 2 on ") == 2
    journal = ledger_file.parent / "run2/loggers/mlflow.jsonl"
    journal.parent.mkdir()
    journal.write_text("")
    assert main(["sync", "--dry-run"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert shlex.split(last)[1:] == send_command(ledger_file.parent / "run2", "mlflow")[1:]


def test_a_torn_ledger_line_hides_nothing_else(ledger_file: Path) -> None:
    with ledger_file.open("a") as file:
        file.write('{"name": "s/9", "swe')
    assert len(ledger.read(ledger_file)) == 4


def test_damaged_records_of_one_run_hide_no_other(
    ledger_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ledger_file.open("ab") as file:
        file.write(b"\xff\n" + b'{"run": "a\\u0000b"}\n')
    (tmp_path / "run1/attempts.jsonl").write_bytes(b"\xff\n" + b"[" * 200_000 + b"\n{}\n")
    (tmp_path / "run2/logs/attempt_1").rmdir()
    (tmp_path / "run2/logs/attempt_1").write_text("")
    assert main(["status", "--json"]) == 0
    captured = capsys.readouterr()
    states = {line["name"]: line["state"] for line in map(json.loads, captured.out.splitlines())}
    assert states["s/0"] == "COMPLETED" and states["s/2"] == "PENDING" and len(states) == 4
    assert captured.err.count("[WARNING]") == 2
    assert main(["cancel", "s/2"]) == 0 and "cancelled 1 run(s): s/2" in capsys.readouterr().out


def test_jobs_imports_fast_and_without_torch() -> None:
    code = (
        "import sys\n"
        "import jobs.__main__, jobs.submit.plan, jobs.submit.script, jobs.attempt.bookkeeping, "
        "jobs.view.commands\n"
        "assert not {'torch', 'numpy', 'pydantic', 'omegaconf', 'hydra', 'transformers'} & "
        "set(sys.modules)\n"
        "assert len(sys.modules) < 400, len(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)
    whole = "import sys, jobs.hydra_entry, jobs.submit.executor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", whole], check=True, cwd=ROOT, timeout=300)


def test_a_run_folder_that_is_gone_is_named(
    ledger_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run1").rename(tmp_path / "moved")
    assert main(["status", "s/1", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["state"] == "LOST" and "run folder is not there" in shown["reason"]
    for command in ("resubmit", "logs", "compare", "sync"):
        assert main([command, "s/1"]) == 2
        said = capsys.readouterr().err
        assert f"there is no run folder {tmp_path / 'run1'} any more" in said, command
        assert "moved, move it back" in said and "Traceback" not in said
