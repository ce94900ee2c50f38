"""The answers that the rules are tried on before a run: some of every data source."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.config.helpers import minimal_settings
from trainer.base.errors import UserError
from trainer.config.keys import dotted
from trainer.config.loading import load
from trainer.data import first_truths
from trainer.data.first_truths import PER_FILE, PER_SOURCE


def write(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(**settings: Any) -> Any:
    tree = minimal_settings()
    for key, value in {"data.task": None, "data.val_files": None, **settings}.items():
        dotted.put(tree, key, value)
    dotted.put(tree, "trainer.test_freq", -1)
    return load(tree)


def row(source: str | None, answer: Any = "1") -> dict[str, Any]:
    named = {} if source is None else {"data_source": source}
    return {"prompt": "a", "answer": answer, **named}


def test_the_first_rows_of_each_source_are_found_wherever_they_begin(tmp_path: Path) -> None:
    rows = [row("a")] * (PER_FILE + 5) + [row("b")] * PER_FILE + [row(None)] * PER_FILE
    file = write(tmp_path / "mixed.jsonl", rows)
    truths = list(first_truths(config(**{"data.train_files": file})))
    found = [(t.data_source, t.named) for t in truths]
    assert [source for source, _ in found].count("a") == PER_SOURCE
    assert {("a", True), ("b", True), ("mixed", False)} == set(found)
    assert truths[0].location == f"{file}, row 1"
    assert truths[0].key == "data.train_files"


def test_rows_beyond_the_limit_and_rows_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", [row("a", ""), row("a", "2"), row("b")])
    settings = {"data.train_files": file, "data.train_max_samples": 2}
    assert [t.ground_truth for t in first_truths(config(**settings))] == ["2"]


def test_the_search_for_sources_ends_in_time(tmp_path: Path) -> None:
    file = write(tmp_path / "d.jsonl", [row(str(i)) for i in range(100)])
    clock = itertools.count(0, 3).__next__
    found = list(first_truths(config(**{"data.train_files": file}), clock=lambda: float(clock())))
    assert 1 < len(found) < 10


def test_the_truth_is_read_as_the_rule_of_its_source_takes_it(tmp_path: Path) -> None:
    rows = [row("searchR1_nq", {"target": ["x", "y"]}), row("own", "so #### 1,000")]
    file = write(tmp_path / "d.jsonl", rows)
    settings = {"data.train_files": file}
    assert [t.ground_truth for t in first_truths(config(**settings))] == [["x", "y"], "1000"]
    exact = config(**settings, **{"reward.rules": {"own": "exact_match"}})
    assert [t.ground_truth for t in first_truths(exact)][1] == "so #### 1,000"


def test_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.train_files: there is no file"):
        list(first_truths(config(**{"data.train_files": str(tmp_path / "none.jsonl")})))
