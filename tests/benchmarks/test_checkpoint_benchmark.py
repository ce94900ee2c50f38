"""The short form of ``benchmarks.checkpoint``: every way saves, ours reads back whole; times are another machine's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.serial
@pytest.mark.timeout(300)
def test_quick_run_measures_every_way(tmp_path: Path) -> None:
    out = tmp_path / "checkpoint.json"
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--quick", "--json", str(out), "--dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(out.read_text())
    rows = {row["way"]: row for row in result["rows"]}
    assert len(rows) == 8
    assert rows["plimsoll"]["stall_s"] < rows["DeepSpeed save_checkpoint"]["stall_s"]
    assert result["checks"]["damaged files of a checkpoint read back"]["ok"]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.json"]
