"""The planner benchmark runs from the command line and holds its efficiency bars."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness import SHARED

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.serial
@pytest.mark.timeout(120)
def test_quick_run_holds_every_bar_but_that_of_time(tmp_path: Path) -> None:
    """Times are those of the machine that runs this; the efficiencies are the same everywhere."""
    if not (SHARED / "data" / "lengths").is_dir():
        pytest.skip("needs the length traces of ../shared (PLIMSOLL_SHARED)")
    out = tmp_path / "planner.json"
    command = [sys.executable, "-m", "benchmarks.planner", "--quick", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(out.read_text())
    assert result["rows"]
    short = [name for name, check in result["checks"].items() if not check["ok"] and ", ms" not in name]
    assert not short
