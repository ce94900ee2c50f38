"""A reward by length, which differs between the responses of a model that has learnt nothing."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    length = len(solution_str)
    return {"score": length / 10, "length": float(length)}
