"""Attempts, and files of a run folder that a crash may have cut short."""

from __future__ import annotations

from pathlib import Path

from trainer.base.run_folder import (
    last_attempt,
    log_folder,
    log_tail,
    new_attempt,
    read_json,
    read_json_lines,
)


def test_attempts_have_folders_of_their_own(tmp_path: Path) -> None:
    assert last_attempt(tmp_path) == 0
    assert [new_attempt(tmp_path) for _ in range(2)] == [1, 2]
    (tmp_path / "logs" / "attempt_10").mkdir()
    number = new_attempt(tmp_path)
    assert number == 11 == last_attempt(tmp_path)
    assert log_folder(tmp_path, number).stat().st_mode & 0o077 == 0


def test_the_tail_of_a_huge_log_is_its_end(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x" * 200_000 + "\nlast\n")
    assert log_tail(tmp_path / "log", 1) == "last"
    assert "can't be read" in log_tail(tmp_path / "none")


def test_records_that_are_cut_short_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes('{"a": 1}\n[2]\n{"b": "é'.encode()[:-1])
    assert read_json_lines(tmp_path / "lines") == [{"a": 1}]
    (tmp_path / "one").write_text('{"a": ')
    assert read_json(tmp_path / "one") == read_json(tmp_path / "none") == {}
