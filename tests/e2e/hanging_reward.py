"""A reward function that hangs in one call of the first attempt: with ``PLIMSOLL_TEST_HANGS_AT=K``
the K-th call of each rank's worker, until the file ``let_go`` is in ``PLIMSOLL_TEST_FOLDER``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

FOLDER = "PLIMSOLL_TEST_FOLDER"
HANGS_AT = "PLIMSOLL_TEST_HANGS_AT"
LET_GO = "let_go"
HANG_S = 280.0

_calls = 0


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    global _calls
    _calls += 1
    folder = Path(os.environ[FOLDER])
    if _calls == int(os.environ.get(HANGS_AT, "0")) and not (folder / LET_GO).exists():
        (folder / f"hangs_{os.environ.get('RANK', '0')}").touch()
        time.sleep(HANG_S)
    return float(sum(map(ord, solution_str)) % 7)
