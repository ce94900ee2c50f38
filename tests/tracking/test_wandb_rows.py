"""Every line of the record reaches W&B once, whatever ends an attempt or W&B's service."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import wandb

from tests.tracking.test_tracker import make
from tests.tracking.wandb_file import history, only
from tests.tracking.wandb_server import FakeServer
from trainer.tracking import Tracker
from trainer.tracking.rebuild import main, rebuild
from trainer.tracking.wandb_run import _forget_service

ROOT = Path(__file__).parents[2]
STEP = "training/global_step"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    for key in [k for k in os.environ if k.startswith("WANDB_")]:
        monkeypatch.delenv(key)
    with FakeServer() as fake:
        monkeypatch.setenv("WANDB_BASE_URL", fake.url)
        monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
        monkeypatch.setenv("HOME", str(tmp_path))
        wandb.teardown()  # the client keeps its first settings for the whole process
        yield fake
        wandb.teardown()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(
        "trainer:\n  project_name: plim\nactor_rollout_ref:\n  rollout:\n    n: 2\n"
    )
    return folder


def log_steps(tracker: Tracker, first: int, last: int) -> None:
    for step in range(first, last + 1):
        tracker.log(step, {"reward/mean": step / 4})


def kill_service() -> None:
    services = psutil.Process().children(recursive=True)
    assert services
    for process in services:
        process.terminate()
    psutil.wait_procs(services, 100)


REQUEUED = """
import os, signal, sys
from pathlib import Path
import psutil
from tests.tracking.test_tracker import log_steps, make
from trainer.base import signals
signals.install()
tracker = make(Path(sys.argv[1]), ("wandb",))
log_steps(tracker, 1, 4)
tracker.log_generations(4, [{"prompt": "1+1=", "answer": "2"}])
tree = psutil.Process().children(recursive=True)
assert tree
for process in tree:
    process.terminate()  # Slurm signals every process of the step
os.kill(os.getpid(), signal.SIGTERM)
psutil.wait_procs(tree, 100)
assert signals.requested() == "TERM"
tracker.log_generations(5, [{"prompt": "2+2=", "answer": "4"}])
log_steps(tracker, 5, 5)
tracker.close(85)
sys.exit(85)
"""


def test_a_requeue_loses_no_step(run: Path) -> None:
    # Without the address of this process's service.
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", REQUEUED, str(run)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=ROOT,
        env=env,
    )
    assert (done.returncode, done.stderr) == (85, "")
    (folder,) = (run / "wandb").glob("offline-run-*")
    rows = history(folder)
    assert [row[STEP] for row in rows if "reward/mean" in row] == [1, 2, 3, 4, 5]
    assert [row["reward/mean"] for row in rows if "reward/mean" in row] == [
        0.25 * step for step in range(1, 6)
    ]
    assert [row[STEP] for row in rows if "reward/mean" not in row] == [4, 5]  # the tables
    assert only(folder, "exit").exit_code == 85


def test_a_service_lost_at_the_end_is_noticed(run: Path) -> None:
    wandb.teardown()
    tracker = make(run, ("wandb",))
    log_steps(tracker, 1, 3)
    kill_service()
    tracker.close(0)
    (folder,) = (run / "wandb").glob("offline-run-*")
    assert [row[STEP] for row in history(folder)] == [1, 2, 3]
    assert only(folder, "exit").exit_code == 0


def test_sync_sends_each_step_once(
    run: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = make(run, ("wandb",))  # offline, and gone after step 7 with a checkpoint of step 3
    log_steps(killed, 1, 7)
    kill_service()
    _forget_service()
    again = make(run, ("wandb",), steps_done=3, attempt=2)
    log_steps(again, 4, 5)
    again.close(0)
    for expected in ("5 rows", "0 rows"):
        assert main([str(run), "--online"]) == 0
        assert capsys.readouterr().out.startswith(f"{expected} sent to W&B run ")
    assert server.steps("reward/mean") == [1, 2, 3, 4, 5]
    assert len(server.ids) == 1

    # More steps offline, then an online attempt: it sends those first, then its own.
    offline = make(run, ("wandb",), steps_done=5, attempt=3)
    log_steps(offline, 6, 7)
    offline.close(85)
    online = make(run, ("wandb",), steps_done=6, attempt=4, mode="online")
    log_steps(online, 7, 9)
    online.close(85)
    assert server.steps("reward/mean") == [*range(1, 10)] and server.exit_codes[-1] == 85
    # Steps that the server has are taken again: they are not sent again.
    online = make(run, ("wandb",), steps_done=7, attempt=5, mode="online")
    log_steps(online, 8, 10)
    online.log(10, {"val/reward": 1.0})  # a further line of the step
    online.close(0)
    assert server.steps("reward/mean") == [*range(1, 11)]
    assert server.steps("val/reward") == [10]
    assert rebuild(run, online=True)[1] == 0 and len(server.ids) == 1
    # A validation of a finished run is a further line of its last step.
    validation = make(run, ("wandb",), steps_done=10, attempt=6, trains=False)
    validation.log(10, {"val/other": 0.5})
    validation.close(0)
    assert rebuild(run, online=True)[1] == 1 and server.steps("val/other") == [10]


def test_an_online_run_goes_on_after_its_service_is_lost(run: Path, server: FakeServer) -> None:
    server.keeps_summary = False
    tracker = make(run, ("wandb",), mode="online")
    log_steps(tracker, 1, 4)
    kill_service()
    arrived = server.steps("reward/mean")
    log_steps(tracker, 5, 6)
    tracker.close(0)
    assert arrived == [1, 2, 3, 4][: len(arrived)]
    assert server.steps("reward/mean") == [1, 2, 3, 4, 5, 6]


def test_without_a_journal_the_summary_says_what_is_there(run: Path, server: FakeServer) -> None:
    tracker = make(run, ("wandb",), mode="online")
    log_steps(tracker, 1, 4)
    tracker.close(0)
    (run / "wandb_rows.jsonl").unlink()
    offline = make(run, ("wandb",), steps_done=4, attempt=2)
    log_steps(offline, 5, 6)
    offline.close(0)
    assert rebuild(run, online=True)[1] == 2
    assert server.steps("reward/mean") == [1, 2, 3, 4, 5, 6]


def test_one_process_at_a_time_sends_a_run(
    run: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(run, ("wandb",), mode="online")
    log_steps(tracker, 1, 2)
    assert main([str(run), "--online"]) == 1
    assert "another process is sending this run" in capsys.readouterr().err
    tracker.close(0)
    assert server.steps("reward/mean") == [1, 2]


def test_a_refused_table_keeps_no_metrics_back(
    run: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = make(run, ("wandb",))
    log_steps(tracker, 1, 1)
    tracker.log_generations(1, [{"prompt": "1+1=", "answer": "2"}])
    log_steps(tracker, 2, 3)
    tracker.close(0)
    assert main([str(run), "--online"]) == 0  # this server has no place for tables
    assert server.steps("reward/mean") == [1, 2, 3]
    assert "W&B took no table of step 1" in capsys.readouterr().err
