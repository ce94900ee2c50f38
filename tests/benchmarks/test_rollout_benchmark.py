"""The short form of ``benchmarks.rollout``: all ways answer the same prompts, and the hf engine is
not the slowest.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rollout import PLAIN
from tests.benchmarks.quick import not_absurd, run_until


@pytest.mark.timeout(3000)
def test_quick_generates_for_the_same_prompts(tmp_path: Path) -> None:
    report = run_until("rollout", tmp_path, not_absurd)
    rows = {row["way"]: row for row in report["rows"]}
    assert {PLAIN, "hf"} <= set(rows)
    assert len({(row["responses"], row["prompt_tokens"]) for row in rows.values()}) == 1
    assert all(0 < row["response_tokens"] <= row["limit"] for row in rows.values())
