"""The short form of ``benchmarks.streaming``: answers are judged while others are generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.quick import not_absurd, run_quick


@pytest.mark.timeout(300)
def test_quick_judges_meanwhile(tmp_path: Path) -> None:
    result = run_quick("streaming", tmp_path)
    rows = {row["way"]: row for row in result["rows"]}
    assert rows["streaming"]["reward_after_s"] < rows["phase by phase"]["reward_after_s"]
    not_absurd(result, 2.0)
