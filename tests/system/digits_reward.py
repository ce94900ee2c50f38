"""A reward that an untrained model earns parts of, so that gradients are not zero."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    return sum(ord(letter) % 7 for letter in solution_str) / (1 + 7 * len(solution_str))
