"""The short form of ``benchmarks.checkpoint``: every way saves, and ours reads back whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.quick import run_quick


@pytest.mark.timeout(3000)
def test_quick_run_measures_every_way(tmp_path: Path) -> None:
    result = run_quick("checkpoint", tmp_path, "--dir", str(tmp_path))
    rows = {row["way"]: row for row in result["rows"]}
    assert len(rows) == 8
    assert result["checks"]["damaged files of a checkpoint read back"]["ok"]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.json"]
