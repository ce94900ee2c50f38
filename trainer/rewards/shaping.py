"""Mixtures of rewards and length penalties: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def mix(scores: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Weighted sum of several rewards [sequences]: ``sum_k weights[k] * scores[k][i]``.

    Raises ValueError when the names of the two differ or the rewards have different lengths.
    """
    if set(scores) != set(weights):
        raise ValueError(
            f"rewards {sorted(scores)} and weights {sorted(weights)} need the same names"
        )
    lengths = {name: len(values) for name, values in scores.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"rewards have different numbers of sequences: {lengths}")
    names = sorted(scores)  # one order of summation for every order of the mapping
    mixed = []
    for row in zip(*(scores[name] for name in names), strict=True):
        terms = [weights[name] * score for name, score in zip(names, row, strict=True)]
        mixed.append(sum(terms))
    return mixed


def length_penalty(length: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-factor, 0].

    0 up to ``max_length - buffer`` tokens, then linear to ``-factor`` at ``max_length`` and beyond.
    Raises ValueError for a ``buffer`` outside of 1 to ``max_length``.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be from 1 to max_length={max_length} tokens, not {buffer}")
    over = length - (max_length - buffer)
    return -factor * min(1.0, max(0.0, over / buffer))
