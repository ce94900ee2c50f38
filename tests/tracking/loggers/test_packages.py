"""The real packages take a run, and give it back."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tracking.loggers.mlflow_server import mlflow_server
from tests.tracking.watermarks import watermarks
from trainer.base.errors import UserError
from trainer.tracking import Tracker
from trainer.tracking.loggers import LOGGERS, check_loggers, followers
from trainer.tracking.loggers.sent_lines import journal_file

BOUND_S = 200.0


def send(run: Path, name: str, env: dict[str, str], code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "trainer.tracking.loggers.follow", str(run), name],
        cwd=run,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env=env,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stderr


def read_back(program: str, env: dict[str, str], *words: str) -> object:
    """What a program that uses the package prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        env=env,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


TENSORBOARD = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
scalars = {tag: [(e.step, e.wall_time, str(e.value)) for e in events.Scalars(tag)]
           for tag in events.Tags()["scalars"]}
texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
         for tag in events.Tags()["tensors"]}
print(json.dumps([scalars, texts]))
"""


def test_tensorboard(run: Path, packages: dict[str, str]) -> None:
    assert "4 lines sent to tensorboard" in send(run, "tensorboard", packages)
    assert "0 lines sent" in send(run, "tensorboard", packages)
    scalars, texts = read_back(TENSORBOARD, packages, str(run / "tensorboard"))
    assert scalars["reward/mean"] == [[1, 10.0, "0.25"], [2, 20.0, "nan"], [3, 30.0, "0.5"]]
    assert scalars["val/acc/mean@4"] == [[1, 10.0, "0.5"]] and "note" not in scalars
    assert "experiment_name: best" in texts["config"] and "a\\|b" in texts["val/generations"]


def test_tensorboard_dir(run: Path, packages: dict[str, str], tmp_path: Path) -> None:
    send(run, "tensorboard", packages | {"TENSORBOARD_DIR": str(tmp_path / "all")})
    assert list((tmp_path / "all/plim/best").iterdir()) and not (run / "tensorboard").exists()


def test_mlflow(run: Path, packages: dict[str, str]) -> None:
    with mlflow_server() as server:
        env = packages | {"MLFLOW_TRACKING_URI": server.address}
        send(run, "mlflow", env)
        assert server.points("val/acc/mean_at_4") == [(1, 0.5)]
        assert [step for step, _ in server.points("reward/mean")] == [1, 2, 3]
        ((number, kept),) = server.runs.items()
        assert kept["name"] == "best" and kept["params"]["trainer.seed"] == "3"
        assert server.experiments == {"plim": "1"} and kept["states"][-1] == "FINISHED"
        assert "a\\|b" in server.files[f"{number}/generations/step_2.md"]
        send(run, "mlflow", env)
        assert list(server.runs) == [number] and len(server.points("reward/mean")) == 3
        # Another run of the project.
        (run / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n')
        journal_file(run, "mlflow").unlink()
        send(run, "mlflow", env)
        assert len(server.runs) == 2 and list(server.experiments) == ["plim"]


MLFLOW = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("plim").experiment_id])
history = client.get_metric_history(run.info.run_id, "reward/mean")
print(json.dumps([run.info.status, run.data.params["trainer.seed"],
                  [(m.step, m.timestamp, str(m.value)) for m in history]]))
"""


def test_mlflows_own_database(run: Path, packages: dict[str, str], tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    env = packages | {"MLFLOW_TRACKING_URI": uri}
    send(run, "mlflow", env)
    status, seed, history = read_back(MLFLOW, env, uri)
    assert (status, seed) == ("FINISHED", "3")
    assert history == [[1, 10000, "0.25"], [2, 20000, "nan"], [3, 30000, "0.5"]]
    (table,) = (tmp_path / "mlartifacts").rglob("generations/step_2.md")
    assert "a\\|b" in table.read_text() and not (run / "mlruns").exists()


TRACKIO = """
import json, sys, trackio
runs = {}
for run in trackio.Api().runs("plim"):
    rows = trackio.SQLiteStorage.get_logs("plim", run.name)
    runs[run.name] = [(row["step"], row.get("reward/mean")) for row in rows]
print(json.dumps(runs))
"""


def test_trackio(run: Path, packages: dict[str, str], tmp_path: Path) -> None:
    env = packages | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    send(run, "trackio", env)
    send(run, "trackio", env)
    runs = read_back(TRACKIO, env)
    assert list(runs) == ["best"]
    values = {step: value for step, value in runs["best"] if value is not None}
    assert values[1] == 0.25 and values[3] == 0.5
    journal_file(run, "trackio").unlink()  # another run of that name
    send(run, "trackio", env)
    names = sorted(read_back(TRACKIO, env))
    assert names[0] == "best" and names[1].startswith("best-") and len(names) == 2


def test_swanlab(run: Path, packages: dict[str, str], tmp_path: Path) -> None:
    send(run, "swanlab", packages | {"SWANLAB_SAVE_DIR": str(tmp_path / "home")})
    (folder,) = (run / "swanlab").glob("run-*")
    (record,) = folder.glob("*.swanlab")
    data = record.read_bytes()
    for text in (b"reward/mean", b"val/acc/mean@4", b"val/generations"):
        assert text in data
    assert record.stat().st_size > 0 and (run / "swanlab").stat().st_mode & 0o77 == 0
    id_line = json.loads(journal_file(run, "swanlab").read_text().splitlines()[0])
    assert id_line["id"] in folder.name


def test_what_is_missing_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]
) -> None:
    check_loggers(LOGGERS, {"MLFLOW_TRACKING_URI": "http://x"})
    with pytest.raises(UserError, match="has mlflow: set MLFLOW_TRACKING_URI to your server"):
        check_loggers(["mlflow"], {})
    with pytest.raises(UserError, match="file:/x is a store of files"):
        check_loggers(["mlflow"], {"MLFLOW_TRACKING_URI": "file:/x"})
    with pytest.raises(UserError, match="SWANLAB_MODE=cloud needs SWANLAB_API_KEY"):
        check_loggers(["swanlab"], {"SWANLAB_MODE": "cloud"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, kind in LOGGERS.items():
        with pytest.raises(UserError, match=rf"Type pip install {kind.package}, or leave {name}"):
            check_loggers([name], {})


def test_a_folder_that_is_no_run(tmp_path: Path, packages: dict[str, str]) -> None:
    assert "metrics.jsonl doesn't exist" in send(tmp_path, "tensorboard", packages, code=2)


@pytest.mark.parametrize("fault", ["down", "error", "slow"])
def test_a_server_that_fails_costs_the_training_nothing(
    run: Path, packages: dict[str, str], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The trainer's calls return at once; afterwards the server has every step."""
    for file in (run / "metrics.jsonl", run / "generations/step_2.jsonl"):
        file.unlink()
    with mlflow_server() as server:
        address = server.address if fault != "down" else "http://127.0.0.1:1"
        monkeypatch.setattr(followers, "CLOSE_S", 3.0)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        if fault == "error":
            server.status = 500
        elif fault == "slow":
            server.slow.clear()
        tracker = tracker_of(run, "mlflow")
        longest = 0.0
        for step in range(1, 21):
            before = time.monotonic()
            tracker.log(step, {f"m/{number}": float(step) for number in range(500)})
            longest = max(longest, time.monotonic() - before)
        if fault == "slow":
            wait_until(lambda: server.requests > 0)
        server.status = 200
        server.slow.set()
        tracker.close(0)
        assert longest < 1.0  # a request would have taken as long as the server is slow
        send(run, "mlflow", packages | {"MLFLOW_TRACKING_URI": server.address})
        assert server.points("m/499") == [(step, float(step)) for step in range(1, 21)]


def tracker_of(run: Path, *loggers: str) -> Tracker:
    return Tracker(
        run,
        {"seed": 1},
        rank=0,
        loggers=list(loggers),
        project="p",
        name="n",
        total_steps=20,
        watermarks=watermarks(),
    )


def wait_until(condition: object) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_loggers_at_once_follow_a_run_and_end_with_it(
    run: Path,
    packages: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for file in (run / "metrics.jsonl", run / "generations/step_2.jsonl"):
        file.unlink()
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("SWANLAB_SAVE_DIR", str(tmp_path / "home"))
    with mlflow_server() as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.address)
        tracker = tracker_of(run, *LOGGERS)
        for step in range(1, 6):
            tracker.log(step, {"a": step / 2})
        # While the run goes on, not only at its end.
        wait_until(lambda: server.runs and len(server.points("a")) == 5)
        tracker.close(85)
        (kept,) = server.runs.values()
        assert kept["states"][-1] == "SCHEDULED"
    scalars, _ = read_back(TENSORBOARD, packages, str(run / "tensorboard"))
    assert [(step, value) for step, _, value in scalars["a"]] == [
        (step, str(step / 2)) for step in range(1, 6)
    ]
    for name in LOGGERS:
        lines = journal_file(run, name).read_text().splitlines()
        assert len([line for line in lines if "step" in line]) == 5
    assert "WARNING" not in capfd.readouterr().err


def test_a_killed_trainer_leaves_no_process(run: Path, packages: dict[str, str]) -> None:
    """The pipe ends with the trainer; the process sends the rest and ends too."""
    with mlflow_server() as server:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.tracking.loggers.follow", str(run), "mlflow", "--live"],
            stdin=subprocess.PIPE,
            env=packages | {"MLFLOW_TRACKING_URI": server.address},
        )
        wait_until(lambda: server.runs and len(server.points("reward/mean")) == 3)
        process.terminate()  # as Slurm does to every process of the job
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(BOUND_S) == 0
        (kept,) = server.runs.values()
        assert kept["states"][-1] == "KILLED"
