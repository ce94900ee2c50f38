"""The short form of ``benchmarks.update``: equal gradients of all four ways, and fewer tokens from
way to way.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.quick import not_absurd, run_until


@pytest.mark.timeout(3000)
def test_quick_holds_its_bars(tmp_path: Path) -> None:
    report = run_until("update", tmp_path, not_absurd)
    gradients = {name: check for name, check in report["checks"].items() if "gradient of" in name}
    assert len(gradients) == 4 and all(check["bar"] == 1e-5 for check in gradients.values())
    tokens = {row["way"]: row["tokens"] for row in report["rows"]}
    assert list(tokens) == [
        "padded to max",
        "padded to longest",
        "packed",
        "packed + shared prompts",
    ]
    assert (
        tokens["packed + shared prompts"]
        < tokens["packed"]
        < tokens["padded to longest"]
        < tokens["padded to max"]
    )
