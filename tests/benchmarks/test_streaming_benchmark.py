"""The short form of ``benchmarks.streaming``: responses are scored while others are generated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.quick import not_absurd, run_until


@pytest.mark.timeout(3000)
def test_quick_scores_while_generating(tmp_path: Path) -> None:
    run_until("streaming", tmp_path, lambda report: waits_less(report) and not_absurd(report))


def waits_less(report: dict[str, Any]) -> bool:
    rows = {row["way"]: row for row in report["rows"]}
    return bool(rows["streaming"]["reward_after_s"] < rows["phase by phase"]["reward_after_s"])
