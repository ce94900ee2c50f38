"""The short form of ``benchmarks.streaming``: judging meanwhile is never slower than judging afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.serial
def test_quick_holds_its_bar(tmp_path: Path) -> None:
    result = tmp_path / "streaming.json"
    done = subprocess.run(  # its process groups and threads are its own
        [sys.executable, "-m", "benchmarks.streaming", "--quick", "--json", str(result)],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["way"]: row for row in json.loads(result.read_text())["rows"]}
    assert rows["streaming"]["reward_after_s"] < rows["phase by phase"]["reward_after_s"]
    assert rows["streaming"]["reward_idle"] < rows["phase by phase"]["reward_idle"]
