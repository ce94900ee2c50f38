"""A reward file whose import lasts for minutes on rank 1, until ``let_go`` is in its folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.e2e.hanging_reward import FOLDER, HANG_S, LET_GO, compute_score

__all__ = ["compute_score"]

folder = Path(os.environ.get(FOLDER, ""))
if os.environ.get("RANK") == "1" and not (folder / LET_GO).exists():
    (folder / "hangs_1").touch()
    time.sleep(HANG_S)
