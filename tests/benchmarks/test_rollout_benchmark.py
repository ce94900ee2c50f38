"""The short form of ``benchmarks.rollout``: all ways answer the same prompts, and the hf engine is not the slowest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import rollout


@pytest.mark.serial
def test_quick_holds_its_bars(tmp_path: Path) -> None:
    threads, result = torch.get_num_threads(), tmp_path / "rollout.json"
    try:
        code = rollout.main(["--quick", "--json", str(result)])
    finally:
        torch.set_num_threads(threads)
    report = json.loads(result.read_text())
    assert code == 0, report["checks"]
    rows = {row["way"]: row for row in report["rows"]}
    assert {rollout.PLAIN, "hf"} <= set(rows)
    assert len({(row["responses"], row["prompt_tokens"]) for row in rows.values()}) == 1
    assert all(0 < row["response_tokens"] <= row["limit"] for row in rows.values())
