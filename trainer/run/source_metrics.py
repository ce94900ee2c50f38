"""Validation with several responses to a prompt, by data source: mean@n, best@k, maj@n, win rate.

Names are verl's: ``val-core/SOURCE/VARIABLE/...`` for the numbers that people compare,
``val-aux/...`` for the rest. With scores of 0 and 1 ``best@k/mean`` is pass@k.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PromptResult:
    """What validation saw of one prompt."""

    index: int
    """Position among the validation prompts."""
    source: str
    """Its ``data_source``."""
    digest: int
    """Of the prompt's tokens: the same index of other data is another prompt."""
    values: Mapping[str, Sequence[float]]
    """Variable (``reward``, and ``acc`` where the reward function gives it) -> one value for each
    response.
    """
    answers: Sequence[str]
    """What each response answers; responses that answer the same vote together."""

    @property
    def mean(self) -> float:
        """The mean reward."""
        return math.fsum(self.values["reward"]) / len(self.values["reward"])


def source_metrics(results: Sequence[PromptResult]) -> dict[str, float]:
    """Means over the prompts of each data source; every prompt has as many responses."""
    by_source: dict[str, list[PromptResult]] = defaultdict(list)
    for result in results:
        by_source[result.source or "unknown"].append(result)
    metrics: dict[str, float] = {}
    for source, prompts in sorted(by_source.items()):
        common = set.intersection(*(set(prompt.values) for prompt in prompts))
        for variable in sorted(common):
            metrics |= _variable_metrics(f"{source}/{variable}", variable, prompts)
    return metrics


def _variable_metrics(
    name: str, variable: str, prompts: Sequence[PromptResult]
) -> dict[str, float]:
    n = len(prompts[0].answers)
    rows = [list(prompt.values[variable]) for prompt in prompts]
    metrics = {f"val-core/{name}/mean@{n}": _mean([_mean(row) for row in rows])}
    if n == 1:
        return metrics
    metrics[f"val-aux/{name}/std@{n}"] = _mean([statistics.stdev(row) for row in rows])
    for k in _sizes(n):
        part = "val-core" if k == n else "val-aux"
        metrics[f"{part}/{name}/best@{k}/mean"] = _mean([best_of(row, k) for row in rows])
    votes = [majority(prompt.answers, row) for prompt, row in zip(prompts, rows, strict=True)]
    metrics[f"val-core/{name}/maj@{n}/mean"] = _mean(votes)
    return metrics


def best_of(values: Sequence[float], k: int) -> float:
    """The expected maximum of ``k`` of the values, drawn without putting back.

    The i-th smallest of n values is the largest of k in C(i-1, k-1) of C(n, k) draws. For values
    of 0 and 1 this is the unbiased estimator of pass@k, 1 - C(n-c, k) / C(n, k) with c ones (Chen
    et al. 2021, arXiv 2107.03374, eq. 1).
    """
    ordered = sorted(values)
    ways = math.comb(len(ordered), k)
    weights = [math.comb(rank, k - 1) / ways for rank in range(len(ordered))]
    return math.fsum(value * weight for value, weight in zip(ordered, weights, strict=True))


def majority(answers: Sequence[str], values: Sequence[float]) -> float:
    """The mean value of the responses that give the most frequent answer; of several equally
    frequent answers the one that came first (Wang et al. 2022, arXiv 2203.11171).
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for answer, value in zip(answers, values, strict=True):
        groups[answer].append(value)
    return _mean(max(groups.values(), key=len))


def win_rate(
    results: Sequence[PromptResult], reference: Mapping[int, tuple[int, float]]
) -> float | None:
    """The share of prompts whose mean reward is above the reference's; equal ones count half.

    ``reference``: index -> (digest, mean reward) of the model that the run began with. None without
    a prompt that both have answered.
    """
    points = []
    for result in results:
        digest, mean = reference.get(result.index, (None, 0.0))
        if digest == result.digest:
            points.append(0.5 + 0.5 * _sign(result.mean - mean))
    return _mean(points) if points else None


def _sign(difference: float) -> int:
    return (difference > 1e-9) - (difference < -1e-9)


def _sizes(n: int) -> list[int]:
    """2, 4, 8 and so on below ``n``, and ``n``."""
    powers = [2**power for power in range(1, n.bit_length()) if 2**power < n]
    return [*powers, n]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
