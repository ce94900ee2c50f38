"""``python -m jobs compare`` over run folders that are made up here."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs.__main__ import main
from jobs.view.comparison import Row, pareto_front, summarise
from jobs.view.curves import read_curves, value_of
from jobs.view.plot import MOST_POINTS, line_of, title_of
from trainer.base.metrics_file import MetricsFile

REWARD = "critic/score/mean"


def step_of(step: int, reward: float, speed: float = 100.0, memory: float = 1.0) -> dict[str, Any]:
    return {
        "step": step,
        REWARD: reward,
        "perf/throughput": speed,
        "perf/total_num_tokens": 10.0,
        "perf/max_memory_allocated_gb": memory,
        "timing/step": 2.0,
    }


def made_run(folder: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    folder.mkdir(parents=True)
    actor = {"lr": settings.get("lr", 1), "name": "x"}
    config = {"actor": actor, "data": {"seed": settings.get("seed", 0)}}
    config["trainer"] = {"default_local_dir": str(folder)}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    record = MetricsFile(folder / "metrics.jsonl", None)
    for values in records:
        record.append(values)
    record.close()
    return folder


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, Any]]:
    """The rows of the JSON output."""
    assert main(["--ledger", "none.jsonl", "compare", *words, "--json", "-"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two learning rates with two seeds each, one that diverged, and one without a step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for lr, speed, memory in ((1, 100.0, 1.0), (2, 200.0, 2.0)):
        for seed in (0, 1):
            records = [step_of(n, lr * n + seed, speed, memory) for n in range(1, 5 + seed)]
            made_run(tmp_path / f"runs/lr{lr}_{seed}", records, lr=lr, seed=seed)
    bad = [step_of(1, 9.0, 50.0, 3.0), step_of(2, math.nan, 50.0, 3.0)]
    made_run(tmp_path / "runs/lr3_0", bad, lr=3)
    made_run(tmp_path / "runs/lr4_0", [], lr=4)
    return tmp_path


def test_seeds_are_one_row_and_the_best_is_marked(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = compared(capsys, "runs")
    assert [(row["run"], row["settings"], row["marks"]) for row in rows] == [
        ("lr1_0 x2", {"actor.lr": "1"}, ["pareto"]),
        ("lr2_0 x2", {"actor.lr": "2"}, ["best", "pareto"]),
        ("lr3_0", {"actor.lr": "3", "data.seed": "0"}, ["diverged"]),
        ("lr4_0", {"actor.lr": "4", "data.seed": "0"}, ["no steps"]),
    ]
    # At step 4, which all healthy runs have: 2 * 4 + 0 and 2 * 4 + 1.
    assert rows[1]["metrics"][REWARD] == {
        "mean": 8.5,
        "std": pytest.approx(0.7071, abs=1e-4),
        "count": 2,
        "not_finite": 0,
    }
    assert rows[2]["metrics"][REWARD]["mean"] == "nan"
    assert len(compared(capsys, "runs", "--each-run")) == 6


@pytest.mark.parametrize(
    ("words", "reward"),
    [
        ([], 4.0),
        (["--value", "mean-2"], 3.5),
        (["--value", "best"], 4.0),
        (["--at", "3"], 3.0),
        (["--at", "end"], 4.0),
        (["--axis", "tokens", "--at", "29"], 2.0),
        (["--axis", "time", "--at", "2"], 1.0),
    ],
)
def test_where_and_how_to_look(
    runs: Path, words: list[str], reward: float, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = compared(capsys, "runs/lr1_0", "runs/lr1_1", "--each-run", *words)
    assert rows[0]["metrics"][REWARD]["mean"] == reward


def test_best_of_a_loss_is_the_least(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "a", [{"step": n, "train/loss": abs(n - 2)} for n in range(5)])
    curves = read_curves(folder, lambda name: True)
    assert value_of(curves, "train/loss", "step", None, "best") == 0


def test_the_order(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    by_reward = compared(capsys, "runs", "--sort", REWARD)
    assert [row["run"] for row in by_reward] == ["lr2_0 x2", "lr1_0 x2", "lr3_0", "lr4_0"]
    by_memory = compared(capsys, "runs", "--sort", "perf/max_memory_allocated_gb")
    assert [row["run"] for row in by_memory] == ["lr1_0 x2", "lr2_0 x2", "lr3_0", "lr4_0"]
    assert by_memory[0]["marks"][0] == "best"
    by_setting = compared(capsys, "runs/lr3*", "runs/lr2*", "--sort", "lr", "--each-run")
    assert [row["run"] for row in by_setting] == ["lr2_0", "lr2_1", "lr3_0"]


def test_a_pattern_of_metrics_at_80_columns(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "runs", "--metric", "perf/*", "--metric", REWARD]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "8.5 ± 0.71" in out and "nan" in out and "lr=2" in out


def test_csv_says_the_same(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "runs", "--csv", "out.csv"]) == 0
    rows = list(csv.DictReader(io.StringIO((runs / "out.csv").read_text())))
    assert [row["actor.lr"] for row in rows] == ["1", "2", "3", "4"]
    assert (rows[1][REWARD], rows[1][f"{REWARD} n"]) == ("8.5", "2")
    assert rows[3][REWARD] == "" and rows[1]["runs"] == "lr2_0 lr2_1"


def test_a_preempted_run_equals_its_twin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three preemptions, each before the checkpoint: resumed by the trainer's own record, and by
    one that holds the repeated steps twice and half a line.
    """
    monkeypatch.chdir(tmp_path)
    records = [step_of(n, n / 10) for n in range(1, 11)]
    made_run(tmp_path / "twin", records)
    resumed = made_run(tmp_path / "resumed", records[:4])
    doubled = made_run(tmp_path / "doubled", records[:4])
    for attempt, (saved, until) in enumerate([(2, 6), (5, 7), (6, 10)], start=2):
        record = MetricsFile(resumed / "metrics.jsonl", saved, attempt=attempt)
        for values in records[saved:until]:
            record.append(values)
        record.close()
        with (doubled / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(values) + "\n" for values in records[saved:until])
    with (doubled / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "critic/sc')
    for words in ([], ["--axis", "time", "--at", "9"], ["--axis", "tokens"], ["--value", "mean-4"]):
        rows = compared(capsys, "twin", "resumed", "doubled", *words)
        assert rows[0]["metrics"][REWARD]["count"] == 1
        assert rows[0]["metrics"] == rows[1]["metrics"] == rows[2]["metrics"], words
        assert [row["last_step"] for row in rows] == [10, 10, 10]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--metric", "critic/scores/mean"], "did you mean 'critic/score/mean'"),
        (["--metric", "nothing/*"], "no run has the metric 'nothing/*'"),
        (["--value", "mean-0"], "--value mean-0: give last, best, or mean-K"),
        (["--at", "nan"], "--at nan: give a number, or one of common, end."),
        (["--at", "-1"], "--at -1: give a number"),
        (["--at", "99", "--axis", "tokens"], "no run has tokens 99: the newest one is 50"),
        (["--sort", "actor.lrr"], "is no metric and no setting that differs"),
        (["--csv", "no/folder/out.csv"], "no/folder/out.csv can't be written (No such file"),
    ],
)
def test_bad_input(
    runs: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "runs", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_two_runs_of_one_id_are_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("lr1_0", "lr2_0"):
        (runs / f"runs/{name}/wandb.json").write_text('{"id": "abc"}')
    assert main(["compare", "abc"]) == 0
    assert "lr1_0 and lr2_0 have one W&B id, abc" in capsys.readouterr().err


def test_no_run_has_begun(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "runs/lr4_0"]) == 0
    assert "no steps" in capsys.readouterr().out


def test_a_run_of_an_older_schema(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "runs/lr1_0/config.yaml").write_text("data: {seed: 0}\n")
    rows = compared(capsys, "runs/lr1_0", "runs/lr2_0")
    assert [row["settings"]["actor.lr"] for row in rows] == ["-", "2"]


def test_pareto_front() -> None:
    pairs = [(3.0, 3.0), (2.0, 1.0), (1.0, 2.0), (3.0, 3.0), (None, 0.0), (math.nan, 0.0)]
    assert pareto_front(pairs) == {0, 1, 3}


def test_a_summary_counts_what_is_not_finite() -> None:
    value = summarise([1.0, 3.0, math.inf])
    assert (value.mean, value.not_finite, value.text) == (2.0, 1, "2 ± 1.4 (1 nan/inf)")


def test_the_curves_as_a_picture(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--ledger", "none.jsonl", "compare", "runs/*"]
    assert main([*words, "--plot", "curves.png"]) == 0
    assert REWARD[:12] in capsys.readouterr().out  # the table is there as well
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    assert Path("curves.png").stat().st_mode & 0o77 == 0
    assert main([*words, "--plot", "no/such/folder.png"]) == 2
    assert "can't be written" in capsys.readouterr().err


def test_a_line_is_the_mean_over_seeds_with_its_deviation(tmp_path: Path) -> None:
    for name, shift in (("a", 0.0), ("b", 1.0)):
        made_run(tmp_path / name, [step_of(step, step + shift) for step in range(1, 1501)])
    curves = {name: read_curves(tmp_path / name, lambda _: True) for name in ("a", "b")}
    row = Row(["a", "b"], {"lr": "1"}, {}, 1500)
    line = line_of(row, REWARD, curves, "step")
    assert line is not None
    places, means, spreads = line
    assert len(places) == MOST_POINTS and math.isclose(sum(places) / 600, 750.5, rel_tol=1e-3)
    assert all(math.isclose(mean, place + 0.5) for place, mean in zip(places, means, strict=True))
    assert all(math.isclose(spread, 0.5**0.5) for spread in spreads)
    tokens = line_of(row, REWARD, curves, "tokens")
    assert tokens is not None and math.isclose(tokens[0][0], 10 * places[0])
    assert line_of(row, "no/such", curves, "step") is None
    assert title_of(row) == "lr=1 (2 seeds)"
