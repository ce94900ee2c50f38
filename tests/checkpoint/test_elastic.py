"""A run resumes with another number of ranks or another ZeRO stage without losing state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fork_server import ForkServer

START = [(stage, bf16) for stage in (0, 1, 2, 3) for bf16 in (False, True) if stage or not bf16]


def _legs(attempt: int, expect: int, then: dict[int, int]) -> list[dict[str, Any]]:
    return [
        {
            "run": f"{stage}-{bf16}",
            "stage": then[stage],
            "bf16": bf16,
            "attempt": attempt,
            "expect": expect,
        }
        for stage, bf16 in START
        if then[stage] or not bf16
    ]


@pytest.mark.slow
def test_two_ranks_one_rank_two_ranks_across_stages(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    worlds = [
        (2, {0: 0, 1: 1, 2: 2, 3: 3}),
        (1, {0: 1, 1: 2, 2: 3, 3: 1}),
        (2, {0: 3, 1: 1, 2: 0, 3: 2}),
    ]
    for attempt, (size, stages) in enumerate(worlds):
        legs = _legs(attempt, attempt * 2, stages)
        fork_server.start(
            "tests.checkpoint.rank_programs:elastic",
            size,
            [str(tmp_path), str(tmp_path / f"store{attempt}"), legs],
            tmp_path / f"log{attempt}",
        ).finish()
