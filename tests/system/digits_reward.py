"""A reward that an untrained model earns parts of, so that gradients are not zero."""

import time


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    time.sleep(0.05)  # a run must still be there when the next interruption comes
    return sum(ord(letter) % 7 for letter in solution_str) / (1 + 7 * len(solution_str))
