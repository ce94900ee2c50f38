"""Which jobs are runs of their own, where they go, and what they are called."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import ledger
from jobs.hydra_entry import launch_here, launch_on_slurm
from jobs.records import append_line
from jobs.submit.launch import Point, jobs_of
from jobs.submit.names import LONGEST, display_names
from tests.jobs.conftest import point
from trainer.base.errors import UserError
from trainer.config import load_frozen
from trainer.tracking import Tracker
from trainer.tracking.wandb_run import WandbIdentity


def launch(book: Path, folder: Path, *points: Point, **options: Any) -> list[ledger.Entry]:
    assert launch_on_slurm(points, {"ledger": str(book), **options}, folder) == 0
    return ledger.read(book)


def seeds(*values: int) -> list[Point]:
    return [
        point(n, f"trainer.seed={value}", "trainer.project_name=p", trainer__seed=value)
        for n, value in enumerate(values)
    ]


def image_point(index: int, image: Path) -> Point:
    container = {"runtime": "apptainer", "image": str(image)}
    return point(index, f"container.image={image}", container=container)


def complete(entry: ledger.Entry, cause: str = "done") -> None:
    line = {"attempt": 1, "launch": entry.launch, "cause": cause, "why": cause, "requeue": False}
    append_line(Path(entry.run) / "attempts.jsonl", line)
    (Path(entry.run) / "logs/attempt_1").mkdir(parents=True)


def test_two_images_are_two_runs(
    fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = [tmp_path / name for name in ("a.sif", "b.sif")]
    for image in images:
        image.write_text("the same bytes")
    points = [image_point(n, image) for n, image in enumerate(images)]
    first = launch(tmp_path / "l", tmp_path / "s", *points)
    assert [entry.name for entry in first] == ["s/0", "s/1"]
    for number, image in enumerate(images):
        record = json.loads((Path(first[number].run) / "job.json").read_text())
        assert record["image"]["path"] == str(image)
        complete(first[number])
    # A build under the same name is the same run, a new name is a new one.
    images[1].write_text("other bytes")
    (tmp_path / "c.sif").write_text("the same bytes")
    points = [image_point(n, tmp_path / name) for n, name in enumerate(("b.sif", "c.sif"))]
    capsys.readouterr()
    assert len(launch(tmp_path / "l", tmp_path / "t", *points)) == 3
    assert "left out 0: launched before as s/1 (COMPLETED)" in capsys.readouterr().out


def test_what_differs_in_its_place_only_is_a_run_of_its_own(fake: Path, tmp_path: Path) -> None:
    """Two clusters, or two folders, are asked for on purpose; and each finds its earlier run."""
    book = tmp_path / "l"
    clusters = [
        point(n, f"cluster={name}", cluster={"name": name}) for n, name in enumerate(("a", "b"))
    ]
    assert len(launch(book, tmp_path / "s", *clusters)) == 2
    for entry in ledger.read(book):
        complete(entry, "error")
    again = launch(book, tmp_path / "t", *clusters)
    assert len(again) == 2 and len({entry.run for entry in again}) == 2
    folders = [
        point(
            n,
            f"trainer.default_local_dir={tmp_path / name}",
            trainer__default_local_dir=str(tmp_path / name),
        )
        for n, name in enumerate(("x", "y"))
    ]
    assert {Path(entry.run).name for entry in launch(book, tmp_path / "u", *folders)} >= {"x", "y"}


def test_a_name_is_one_runs(fake: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = tmp_path / "l"
    launch(book, tmp_path / "a/lr", *seeds(1, 2))
    launch(book, tmp_path / "b/lr", *seeds(3, 4))
    assert "sweep lr-2: 2 job(s)" in capsys.readouterr().out
    launch(book, tmp_path / "a/other", *seeds(5), sweep="lr")
    names = [entry.name for entry in ledger.read(book)]
    assert names == ["lr/0", "lr/1", "lr-2/0", "lr-2/1", "lr-3/0"]
    for entry in ledger.read(book):
        record = json.loads((Path(entry.run) / "job.json").read_text())
        assert (record["name"], record["sweep"]) == (entry.name, entry.sweep)
    # In W&B they are one group still: it is what the user called it.
    assert all("WANDB_RUN_GROUP=lr\n" in p.read_text() for p in fake.glob("script*"))
    # The resumed ones keep their names.
    for entry in ledger.read(book)[:2]:
        complete(entry, "error")
    assert [e.name for e in launch(book, tmp_path / "c/lr", *seeds(1, 2))] == names


def test_launches_at_once_take_different_names(fake: Path, tmp_path: Path) -> None:
    book = tmp_path / "l"
    threads = [
        threading.Thread(target=launch, args=(book, tmp_path / f"{n}/lr", *seeds(n)))
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert sorted(e.name for e in ledger.read(book)) == ["lr-2/0", "lr-3/0", "lr-4/0", "lr/0"]


@pytest.mark.parametrize(
    ("points", "names"),
    [
        (seeds(1, 2), ["s/0 seed=1", "s/1 seed=2"]),
        (seeds(1), ["s/0"]),
        (
            [
                point(n, f"trainer.experiment_name={name}", trainer__experiment_name=name)
                for n, name in enumerate(("base", "new"))
            ],
            ["base", "new"],
        ),
        (
            [
                point(
                    n,
                    "trainer.experiment_name=ppo",
                    f"trainer.seed={n}",
                    trainer__experiment_name="ppo",
                    trainer__seed=n,
                )
                for n in range(2)
            ],
            ["ppo/0 seed=0", "ppo/1 seed=1"],
        ),
        (
            [point(0, "trainer.experiment_name=ppo", trainer__experiment_name="ppo")],
            ["ppo"],
        ),
    ],
    ids=["varying", "single", "own", "shared", "single own"],
)
def test_runs_of_a_sweep_can_be_told_apart_in_wandb(
    fake: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    points: list[Point],
    names: list[str],
) -> None:
    shown: list[str] = []

    class Run:
        def __init__(self, *_: object, identity: WandbIdentity, **__: object) -> None:
            shown.append(identity.name)

        def finish(self, exit_code: int) -> None: ...

    monkeypatch.setattr("trainer.tracking.tracker.WandbRun", Run)
    for one in points:
        one.config["trainer"]["logger"] = ["wandb"]
    for entry in launch(tmp_path / "l", tmp_path / "s", *points):
        run = Path(entry.run)
        config = load_frozen(run)
        tracker = Tracker.from_config(config, run, rank=0, total_steps=1, steps_done=0, attempt=1)
        tracker.close(0)
    assert shown == names


def test_a_long_name_is_cut(tmp_path: Path) -> None:
    overrides = [f"data.train_files={'x' * 200}{n}" for n in range(2)]
    jobs = jobs_of([point(n, text, trainer__seed=n) for n, text in enumerate(overrides)], tmp_path)
    name = display_names(jobs, "s")[1]
    assert len(name) == LONGEST and name.startswith("s/1 train_files=xxx")


def with_subdir(one: Point, subdir: str) -> Point:
    return Point(index=one.index, overrides=one.overrides, config=one.config, subdir=subdir)


def test_a_subdir_is_the_run_folder(fake: Path, tmp_path: Path) -> None:
    points = [with_subdir(one, f"lr/{one.index}") for one in seeds(1, 2)]
    entries = launch(tmp_path / "l", tmp_path / "s", *points)
    assert [entry.run for entry in entries] == [str(tmp_path / f"s/lr/{n}") for n in range(2)]
    assert all((Path(entry.run) / "config.yaml").exists() for entry in entries)


@pytest.mark.parametrize("subdir", ["", ".", "code", "code/x", ".submitit/a", ".."])
def test_a_subdir_that_is_no_run_folder(tmp_path: Path, subdir: str) -> None:
    with pytest.raises(UserError, match=r"job 0 .*hydra.sweep.subdir=.* is no folder for a run"):
        jobs_of([with_subdir(seeds(1)[0], subdir)], tmp_path / "s")


def test_a_subdir_that_jobs_share_or_that_contradicts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"jobs 0 and 1 share .* hydra.sweep.subdir"):
        jobs_of([with_subdir(one, "x") for one in seeds(1, 2)], tmp_path / "s")
    both = point(0, "trainer.default_local_dir=/x", trainer__default_local_dir="/x")
    with pytest.raises(UserError, match="both name the run folder"):
        jobs_of([with_subdir(both, "x")], tmp_path / "s")


def test_the_waiting_jobs_of_a_local_sweep_are_in_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later launch can neither take their names nor start them again."""
    book = tmp_path / "l"
    looks: list[str] = []

    def look(*_: object) -> SimpleNamespace:
        if not looks:
            looks.append("")
            assert launch_here(seeds(1, 2), {"ledger": str(book)}, tmp_path / "b/s") == 0
            looks[0] = capsys.readouterr().out
        return SimpleNamespace(cause="done", why="")

    monkeypatch.setattr("jobs.submit.local._run_job", look)
    assert launch_here(seeds(1, 2), {"ledger": str(book)}, tmp_path / "a/s") == 0
    assert "left out 1: launched before as s/1 (PENDING)" in looks[0]
    assert [entry.name for entry in ledger.read(book)] == ["s/0", "s/1"]
