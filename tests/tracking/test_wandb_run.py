"""Attempts are one W&B run, and training survives whatever W&B does."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wandb

from tests.tracking.wandb_file import history, kind_of, only, records
from trainer.tracking import wandb_run
from trainer.tracking.wandb_run import (
    WandbRun,
    choose_mode,
    load_identity,
    load_or_create_identity,
)


@pytest.fixture(autouse=True)
def no_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key in [k for k in os.environ if k.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # the client keeps its first settings for the whole process


def start(folder: Path, mode: str = "offline") -> WandbRun:
    return WandbRun(
        folder,
        {"trainer": {"seed": 7}, "api_key": "abc"},
        identity=load_or_create_identity(folder, "plim", "first", "sweep-1"),
        mode=mode,
    )


def test_attempts_are_one_run_on_the_step_axis(tmp_path: Path) -> None:
    """Two attempts in the same second: one id, a folder each, steps that go on, the real client's
    files.
    """
    folders = []
    for steps, code in ((range(1, 4), 85), (range(3, 6), 0)):
        run = start(tmp_path)
        assert run.folder is not None
        folders.append(run.folder)
        for step in steps:
            run.log(step, {"reward/mean": step / 10, "actor/loss": math.nan})
        run.finish(code)
    assert folders[0] != folders[1]
    for folder, steps, code in ((folders[0], [1, 2, 3], 85), (folders[1], [3, 4, 5], 0)):
        assert folder.parent == tmp_path / "wandb"
        rows = history(folder)
        assert [r["training/global_step"] for r in rows] == steps
        assert [r["reward/mean"] for r in rows] == [s / 10 for s in steps]
        run_record = only(folder, "run")
        assert run_record.run_id == load_identity(tmp_path).id
        assert (run_record.project, run_record.run_group, run_record.display_name) == (
            "plim",
            "sweep-1",
            "first",
        )
        assert only(folder, "exit").exit_code == code
        axes = [
            (r.metric.name or r.metric.glob_name, r.metric.step_metric)
            for r in records(folder)
            if kind_of(r) == "metric"
        ]
        assert ("*", "training/global_step") in axes
        assert b'"abc"' not in next(folder.glob("*.wandb")).read_bytes()


def test_generations_are_a_table(tmp_path: Path) -> None:
    run = start(tmp_path)
    folder = run.folder
    assert folder is not None
    run.log_table(2, [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "5"}])
    run.finish(0)
    (row,) = history(folder)
    assert row["training/global_step"] == 2
    assert list(folder.glob("files/media/table/val/*.table.json"))


def test_the_run_id_is_on_disk_before_the_client_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()

    def die(**arguments: object) -> None:
        assert load_identity(folder).id == arguments["id"]
        raise RuntimeError("killed during init")

    monkeypatch.setattr(wandb, "init", die)
    first = start(folder)
    assert first.folder is None and first.identity == load_identity(folder)
    # the command that is named is one for a run that no ledger knows, and can be pasted
    command = capsys.readouterr().err.splitlines()[-1].partition("type ")[2]
    assert shlex.split(command)[:3] == ["python", "-m", "trainer.tracking.rebuild"]
    assert shlex.split(command)[3:] == [str(folder), "--online"]


def test_no_server_means_offline_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    start_client, waits = (
        WandbRun._start,
        {"online": 2.0, "offline": 200.0},
    )  # the latter answers, in a while

    def timed(self: WandbRun, mode: str) -> bool:
        monkeypatch.setattr(wandb_run, "INIT_TIMEOUT_S", waits[mode])
        began = time.monotonic()
        started = start_client(self, mode)
        assert started or time.monotonic() - began < 80  # the client's own patience is 90 s
        return started

    monkeypatch.setattr(WandbRun, "_start", timed)
    run = start(tmp_path, "online")
    assert run.mode == "offline" and run.folder is not None
    run.finish(0)
    assert "W&B could not start (online)" in capsys.readouterr().err


SERVICE_DIES = """
import contextlib, sys
from pathlib import Path
import psutil
from trainer.tracking.wandb_run import WandbIdentity, WandbRun
identity = WandbIdentity("abcdefgh", "p", "n", None)
run = WandbRun(Path(sys.argv[1]), {}, identity=identity, mode="offline")
services = psutil.Process().children(recursive=True)
assert services
for service in services:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may have gone with the one before
        service.kill()
        service.wait(100)
for step in range(1, 200):
    run.log(step, {"a": 1.0})
run.finish(0)
print("trained to the end")
sys.exit(85)
"""


def test_a_run_survives_its_dead_wandb_service(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVICE_DIES, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout == "trained to the end\n", done.stderr
    assert done.returncode == 85, done.stderr
    assert done.stderr.count("[WARNING] W&B") == 1


def test_when_it_goes_online() -> None:
    key = {"WANDB_API_KEY": "k"}

    def no_network(url: str) -> bool:
        return False

    def network(url: str) -> bool:
        return url == "https://here"

    def url() -> str:
        return "https://here"

    assert choose_mode("auto", {"NETRC": "/nonexistent"}, network, url) == "offline"
    assert choose_mode("auto", key, network, url) == "online"
    assert choose_mode("auto", key | {"WANDB_BASE_URL": "https://there"}, network, url) == "offline"
    assert choose_mode("auto", key, no_network, url) == "offline"
    assert choose_mode("auto", key | {"WANDB_MODE": "disabled"}, network, url) == "disabled"
    assert choose_mode("online", {}, no_network, url) == "online"


def test_disabled_is_off(tmp_path: Path) -> None:
    run = start(tmp_path, "disabled")
    run.log(1, {"a": 1})
    run.finish(0)
    assert not (tmp_path / "wandb").exists()


def test_a_sweeps_group_stays_with_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_GROUP", "sweep-7")
    first = load_or_create_identity(tmp_path, "p", "n", None)
    monkeypatch.delenv("WANDB_RUN_GROUP")
    assert first.group == "sweep-7" and load_or_create_identity(tmp_path, "p", "n", None) == first
    assert (tmp_path / "wandb.json").stat().st_mode & 0o077 == 0
    (tmp_path / "wandb.json").write_text('{"id": "ab')
    assert load_identity(tmp_path) is None
