"""``hydra/launcher=local``: the sweep as processes of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jobs import ledger
from jobs.hydra_entry import launch_here
from jobs.records import attempts
from tests.jobs.conftest import point
from trainer.base.errors import UserError


def test_a_failing_job_stops_no_other_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLIMSOLL_WORKER_MODULE", "tests.jobs.standin")
    monkeypatch.setenv("STANDIN_STEP_S", "0")
    points = [point(0, trainer__experiment_name="crash"), point(1, trainer__n_gpus_per_node=2)]
    options = {"ledger": str(tmp_path / "l")}
    assert launch_here(points, options, tmp_path / "sweep") == 1
    assert "told to crash" in capsys.readouterr().err
    runs = {
        e.name: [a["cause"] for a in attempts(Path(e.run))] for e in ledger.read(tmp_path / "l")
    }
    assert runs == {"sweep/0": ["crash"], "sweep/1": ["done"]}
    good = next(Path(e.run) for e in ledger.read(tmp_path / "l") if e.name == "sweep/1")
    (line,) = attempts(good)
    assert (line["nodes"], line["step_from"], line["step_to"], line["requeue"]) == (
        os.uname().nodename,
        0,
        20,
        False,
    )
    # Two ranks: one attempt, one folder, a log for each and one of what watched them.
    assert sorted(p.name for p in (good / "logs").iterdir()) == ["attempt_1"]
    assert {"launcher.log", "rank_0.log", "rank_1.log"} <= {
        p.name for p in (good / "logs/attempt_1").iterdir()
    }
    # Again: the completed one is left out, the failed one goes on in its folder.
    assert launch_here(points, options, tmp_path / "again") == 1
    assert "left out 1: launched before as sweep/1 (COMPLETED)" in capsys.readouterr().out
    assert len(ledger.read(tmp_path / "l")) == 2


def test_an_unknown_setting(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"hydra\.launcher\.partition is not a setting of the local launcher"
    ):
        launch_here([point(0)], {"partition": "x"}, tmp_path)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (
            {"container": {"runtime": "apptainer", "image": "x.sif"}},
            {},
            "container.runtime=apptainer, but hydra/launcher",
        ),
        (
            {},
            {"timeout_min": 0},
            "hydra.launcher.timeout_min=0 must be a whole number of at least 1",
        ),
        (
            {},
            {"max_retries": -1, "dry_run": True},
            "hydra.launcher.max_retries=-1 must be a whole number of at least 0",
        ),
    ],
)
def test_what_this_launcher_cannot_do(
    tmp_path: Path, settings: dict[str, object], options: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        launch_here(
            [point(0, **settings)], {"ledger": str(tmp_path / "l"), **options}, tmp_path / "sweep"
        )
    assert not (tmp_path / "sweep").exists()
