"""``metrics.jsonl``: whole lines, strict JSON, and equal after a resume."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.base.metrics_file import (
    MetricsFile,
    ReplacedSteps,
    by_step,
    last_step,
    last_value,
    last_values,
    read_metrics,
    read_tail,
    replaced_file,
    to_plain,
)


def write(path: Path, steps: range, steps_done: int) -> MetricsFile:
    file = MetricsFile(path, steps_done)
    for step in steps:
        file.append({"step": step, "loss": 1.0 / step})
    return file


@settings(max_examples=30, deadline=None)
@given(total=st.integers(1, 8), data=st.data())
def test_a_resumed_record_equals_an_uninterrupted_one(
    tmp_path_factory: pytest.TempPathFactory, total: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("record")
    write(folder / "whole", range(1, total + 1), 0).close()
    died_at = data.draw(st.integers(0, total))
    restored = data.draw(st.integers(0, died_at))
    write(folder / "resumed", range(1, died_at + 1), 0)  # killed: never closed
    with (folder / "resumed").open("ab") as file:
        file.write(
            b'{"step": 9, "lo'[: data.draw(st.integers(0, 15))]
        )  # the kernel may keep part of the last line
    resumed = MetricsFile(folder / "resumed", restored, attempt=7)
    for step in range(restored + 1, total + 1):
        resumed.append({"step": step, "loss": 1.0 / step})
    resumed.close()
    assert (folder / "resumed").read_bytes() == (folder / "whole").read_bytes()
    aside = replaced_file(folder / "resumed", 7)
    assert list(by_step(aside)) == list(range(restored + 1, died_at + 1))
    assert aside.exists() == (restored < died_at)


def test_a_last_line_without_its_end_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"step": 1}\n{"step": 2}')
    file = MetricsFile(tmp_path / "m", 2)
    file.append({"step": 3})
    file.close()
    assert [r["step"] for r in read_metrics(tmp_path / "m")] == [1, 3]


def test_a_validation_before_the_first_step_is_not_kept_twice(tmp_path: Path) -> None:
    for _ in range(2):  # the first attempt dies before any checkpoint
        file = MetricsFile(tmp_path / "m", 0)
        file.append({"step": 0, "val/reward": 0.5})
        file.close()
    assert len(list(read_metrics(tmp_path / "m"))) == 1


def test_no_line_of_a_step_is_lost_when_it_is_taken_again(tmp_path: Path) -> None:
    """Two attempts go back: each keeps the lines that it removed, also when it is killed between
    keeping and removing them.
    """
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 6), 0)
    second = MetricsFile(path, 3, attempt=2)
    assert second.replaced == ReplacedSteps(4, 5, tmp_path / "metrics.before_attempt_2.jsonl")
    second.append({"step": 4, "loss": 9.0})
    third = MetricsFile(path, 0, attempt=3)
    third.append({"step": 1, "loss": 1.0})
    assert MetricsFile(path, 1, attempt=4).replaced is None
    assert list(by_step(tmp_path / "metrics.before_attempt_2.jsonl")) == [4, 5]
    kept = by_step(tmp_path / "metrics.before_attempt_3.jsonl")
    assert list(kept) == [1, 2, 3, 4] and kept[4]["loss"] == 9.0
    assert not (tmp_path / "metrics.before_attempt_4.jsonl").exists()
    assert list(by_step(path)) == [1]
    MetricsFile(path, 0, attempt=2)
    assert list(by_step(tmp_path / "metrics.before_attempt_2.jsonl")) == [1, 4, 5]


def test_the_validation_before_the_first_step_survives_a_resume(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m", 0)
    for step in range(4):
        file.append({"step": step})
    MetricsFile(tmp_path / "m", 2).close()
    assert [r["step"] for r in read_metrics(tmp_path / "m")] == [0, 1, 2]


def test_without_a_restored_step_only_a_half_line_is_cut(tmp_path: Path) -> None:
    (tmp_path / "m").write_text('{"step": 1}\n{"step": 5}\n{"st')
    file = MetricsFile(tmp_path / "m", None)
    file.append({"step": 2})
    assert [r["step"] for r in read_metrics(tmp_path / "m")] == [1, 5, 2]


def test_every_line_is_on_disk_at_once_and_strict_json(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m", 0)
    file.append({"step": 1, "a": math.nan, "b": -math.inf, "c": "é"})
    (line,) = (tmp_path / "m").read_text().splitlines()  # not closed, not synced
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    (record,) = read_metrics(tmp_path / "m")
    assert math.isnan(record["a"]) and record["b"] == -math.inf and record["c"] == "é"


def test_metrics_are_numbers_whatever_library_they_come_from() -> None:
    assert (
        to_plain(torch.tensor(0.5)) == 0.5
        and to_plain(np.float32(2)) == 2.0
        and to_plain(torch.tensor([3])) == 3
    )
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        to_plain(torch.zeros(2))
    with pytest.raises(TypeError, match="list"):
        to_plain([1])


def test_later_lines_of_a_step_win(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "m", 0)
    for record in ({"step": 1, "a": 1, "b": 1}, {"step": 1, "b": 2}, {"step": 0, "a": 0}):
        file.append(record)
    assert by_step(tmp_path / "m") == {0: {"step": 0, "a": 0}, 1: {"step": 1, "a": 1, "b": 2}}


def test_the_record_is_private(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "m", 0).close()
    assert (tmp_path / "m").stat().st_mode & 0o077 == 0


def test_the_newest_number_of_a_name(tmp_path: Path) -> None:
    assert last_value(tmp_path / "m", "a") is None
    file = MetricsFile(tmp_path / "m", 0)
    for record in ({"step": 1, "a": 1}, {"step": 2, "a": 2.5, "b": "words"}, {"step": 3, "c": 1}):
        file.append(record)
    (tmp_path / "m").write_text((tmp_path / "m").read_text() + '{"step": 4, "a": 9')
    assert last_value(tmp_path / "m", "a") == 2.5 and last_value(tmp_path / "m", "b") is None
    assert last_value(tmp_path / "m", "a", tail_bytes=30) is None


@pytest.mark.parametrize("spelled", ['"NaN"', "NaN"])
def test_a_number_that_is_not_finite_is_read_however_it_is_spelled(
    tmp_path: Path, spelled: str
) -> None:
    path = tmp_path / "m"
    path.write_text(f'{{"step": 1, "a": 1.0}}\n{{"step": 2, "a": {spelled}}}\n{{"step": 3, "a": ')
    assert math.isnan(last_values(path)["a"])
    value = last_value(path, "a")
    assert value is not None and math.isnan(value)
    assert last_step(path) == 2


def test_the_end_of_a_huge_file_is_enough_for_its_newest_values(tmp_path: Path) -> None:
    path = tmp_path / "m"
    with path.open("w") as file:
        for step in range(20_000):
            file.write(json.dumps({"step": step, "a": float(step)}) + "\n")
    assert len(read_tail(path, 1000)) < 40
    assert last_values(path) == {"step": 19_999, "a": 19_999.0}


def test_a_run_without_a_record_has_no_values(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert (list(read_metrics(path)), last_values(path), last_step(path)) == ([], {}, None)
    path.write_text('[1]\n{"no": "step"}\n{"step": true}\n')
    assert list(read_metrics(path)) == []
