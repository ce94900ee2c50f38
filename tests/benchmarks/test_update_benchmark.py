"""The short form of ``benchmarks.update``: equal gradients of all four ways, and the bars of ``--quick``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.serial
def test_quick_holds_its_bars(shared: Path, tmp_path: Path) -> None:
    result = tmp_path / "update.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.update", "--quick", "--json", str(result)],
        cwd=ROOT,
        env=os.environ | {"PLIMSOLL_SHARED": str(shared)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(result.read_text())
    assert {row["way"] for row in report["rows"]} == {
        "padded to max",
        "padded to longest",
        "packed",
        "packed + shared prompts",
    }
    gradients = {name: check for name, check in report["checks"].items() if "gradient of" in name}
    assert len(gradients) == 4 and all(check["bar"] == 1e-5 for check in gradients.values())
    tokens = {row["way"]: row["tokens"] for row in report["rows"]}
    assert tokens["packed + shared prompts"] < tokens["packed"] < tokens["padded to longest"] < tokens["padded to max"]
