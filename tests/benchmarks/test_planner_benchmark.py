"""The planner benchmark runs from the command line and holds its efficiency bars, which are the
same everywhere.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.quick import run_quick


@pytest.mark.timeout(3000)
def test_quick_run_holds_every_bar_but_that_of_time(tmp_path: Path) -> None:
    run_quick("planner", tmp_path)
