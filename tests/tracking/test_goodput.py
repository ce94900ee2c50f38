"""ETTR of a made history: queue, crash, lost steps, a node that came back."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.tracking.documented import undocumented
from trainer.tracking.goodput import Attempt, GoodputClock, earlier_attempts, goodput, process_start


def test_a_made_history() -> None:
    """1,000 s in all: 400 + 200 + 300 running, 100 in the queue; 700 s of steps that count, 60 s
    done again.
    """
    attempts = [Attempt(1, 0, 400), Attempt(2, 450, 650, 3, 60.0), Attempt(3, 700, 1000)]
    metrics = goodput(attempts, 700.0)
    assert metrics == {
        "goodput/ettr": pytest.approx(700 / 900),
        "goodput/ettr_with_queue": pytest.approx(0.7),
        "goodput/productive_s": 700.0,
        "goodput/wall_s": 900.0,
        "goodput/queue_s": 100.0,
        "goodput/lost_s": 60.0,
        "goodput/lost_steps": 3.0,
        "goodput/attempts": 3.0,
    }
    assert undocumented(set(metrics)) == set()


def test_overlapping_attempts_count_once() -> None:
    found = goodput([Attempt(2, 50, 120), Attempt(1, 0, 100)], 60.0)
    assert (found["goodput/wall_s"], found["goodput/queue_s"], found["goodput/ettr"]) == (
        120.0,
        0.0,
        0.5,
    )


def test_a_run_that_has_just_begun() -> None:
    assert goodput([Attempt(1, 5, 5)], 0.0)["goodput/ettr"] == 0.0


def _record(run: Path, steps: dict[int, tuple[float, float]]) -> None:
    lines = [json.dumps({"step": s, "time": t, "timing/step": d}) for s, (t, d) in steps.items()]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_a_killed_attempt_and_the_one_after_it(tmp_path: Path) -> None:
    """Without any batch script: the record tells how long the killed one lived, and which steps are
    done again.
    """
    first = GoodputClock(tmp_path, 1, restored=0, now=1000.0)
    assert first.metrics(0.0)["goodput/attempts"] == 1
    clock = tmp_path / "logs/attempt_1/clock.json"
    assert clock.stat().st_mode & 0o777 == 0o600
    clock.write_text(
        json.dumps(
            {"number": 1, "start": 1000.0, "end": 1010.0, "undone_steps": 0, "undone_s": 0.0}
        )
    )
    _record(tmp_path, {1: (1010.0, 5.0), 2: (1020.0, 6.0), 3: (1030.0, 7.0)})
    (tmp_path / "logs/attempt_2").mkdir()
    (tmp_path / "logs/attempt_2/begin.json").write_text(json.dumps({"start": 1100.0}))
    found = GoodputClock(tmp_path, 2, restored=1).metrics(5.0, now=1150.0)
    assert found["goodput/wall_s"] == 30.0 + 50.0
    assert found["goodput/queue_s"] == 70.0
    assert (found["goodput/lost_steps"], found["goodput/lost_s"]) == (2.0, 13.0)
    assert found["goodput/ettr"] == pytest.approx(5 / 80)
    third = GoodputClock(tmp_path, 3, restored=3).metrics(18.0, now=time.time())
    assert (third["goodput/lost_steps"], third["goodput/attempts"]) == (2.0, 3.0)


def test_the_batch_script_knows_the_times_better(tmp_path: Path) -> None:
    lines = [{"attempt": 1, "start": 10.0, "end": 70.0}, {"attempt": 2, "start": 80.0, "end": 95.0}]
    (tmp_path / "attempts.jsonl").write_text(
        "\n".join(map(json.dumps, lines)) + '\n{"attempt": 3, "sta'
    )
    (tmp_path / "logs/attempt_1").mkdir(parents=True)
    (tmp_path / "logs/attempt_1/clock.json").write_text('{"start": 15.0, "end": 60.0}')
    assert list(earlier_attempts(tmp_path, 4)) == [Attempt(1, 10.0, 70.0), Attempt(2, 80.0, 95.0)]


def test_a_full_disk_costs_the_clock_only(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("no folder")
    assert GoodputClock(tmp_path, 1, restored=0).metrics(1.0)["goodput/attempts"] == 1


def test_the_start_of_this_process() -> None:
    assert 0 <= time.time() - process_start() < 24 * 3600
