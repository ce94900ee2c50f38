"""Mixtures and length penalties: pure functions of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def mix(scores: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> list[float]:
    """Weighted sum of several rewards, [sequences]: ``sum_k weights[k] * scores[k][i]``.

    Raises ValueError when the names of the two differ or the rewards have different lengths.
    """
    if set(scores) != set(weights):
        raise ValueError(
            f"rewards {sorted(scores)} and weights {sorted(weights)} need the same names"
        )
    if len({len(s) for s in scores.values()}) > 1:
        raise ValueError(
            "rewards have different numbers of sequences: "
            + str({k: len(s) for k, s in scores.items()})
        )
    names = sorted(scores)  # one order of summing, whatever order the mapping has
    return [
        sum(weights[k] * s for k, s in zip(names, row, strict=True))
        for row in zip(*(scores[k] for k in names), strict=True)
    ]


def length_penalty(length: int, *, max_length: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), in [-factor, 0].

    0 up to ``max_length - buffer`` tokens, then falling in a straight line to ``-factor`` at
    ``max_length`` and beyond.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer must be from 1 to max_length={max_length} tokens, not {buffer}")
    over = length - (max_length - buffer)
    return -factor * min(1.0, max(0.0, over / buffer))
