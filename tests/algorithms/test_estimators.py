"""Every estimator against its paper's formula, token by token, on random ragged data with gaps in
the mask and a KL in the reward.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from trainer.algorithms import compute_advantages, sequence_index
from trainer.algorithms.advantages import Estimator
from trainer.config.schema.algorithm import AdvEstimator

KL_COEF = 0.1
GAMMA = 0.97
LAM = 0.9


class Data:
    """12 responses in groups of 4, 3, 4 and 1; one without a trained token, one reward twice."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.groups = torch.tensor([5, 5, 5, 5, 2, 2, 2, 8, 8, 8, 8, 3])
        self.scores = torch.randn(12, generator=g)
        self.scores[9] = self.scores[8]
        lengths = torch.randint(2, 15, (12,), generator=g)
        self.cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.sequence = sequence_index(self.cu)
        self.mask = torch.rand(int(self.cu[-1]), generator=g) < 0.6
        self.mask[self.sequence == 6] = False
        self.mask[self.cu[:-1][8]] = True
        self.kl = torch.rand(self.mask.numel(), generator=g)
        self.values = torch.randn(self.mask.numel(), generator=g)
        self.baselines = torch.randn(12, generator=g)

    def trained(self, i: int) -> list[int]:
        return [t for t in range(int(self.cu[i]), int(self.cu[i + 1])) if self.mask[t]]

    def group(self, i: int) -> list[int]:
        return [j for j in range(12) if self.groups[j] == self.groups[i]]

    def total(self, i: int) -> float:
        """Score minus the weighted KL of the response."""
        return float(self.scores[i]) - KL_COEF * sum(float(self.kl[t]) for t in self.trained(i))

    def rewards(self, i: int) -> list[float]:
        """Of the trained tokens: the KL at each, the score at the last."""
        rewards = [-KL_COEF * float(self.kl[t]) for t in self.trained(i)]
        if rewards:
            rewards[-1] += float(self.scores[i])
        return rewards

    def call(self, name: Estimator) -> Tensor:
        arguments: dict[str, Any] = {
            "scores": self.scores,
            "groups": self.groups,
            "mask": self.mask,
            "sequence": self.sequence,
            "values": self.values,
            "baselines": self.baselines,
            "kl": self.kl,
        }
        return compute_advantages(
            name, **arguments, kl_coef=KL_COEF, gamma=GAMMA, lam=LAM
        ).advantages


Expected = dict[int, float]
"""Trained token -> advantage."""


def by_response(data: Data, advantage: Callable[[list[float], int], float]) -> Expected:
    """``advantage(totals of the group, index in it)`` at each token; a group of one keeps its."""
    out = {}
    for i in range(12):
        group = data.group(i)
        totals = [data.total(j) for j in group]
        value = totals[0] if len(group) == 1 else advantage(totals, group.index(i))
        out |= dict.fromkeys(data.trained(i), value)
    return out


def whitened(raw: Expected) -> Expected:
    mean = statistics.mean(raw.values())
    scale = math.sqrt(statistics.variance(raw.values()) + 1e-8)
    return {t: (value - mean) / scale for t, value in raw.items()}


def to_go(data: Data, gamma: float) -> Expected:
    out = {}
    for i in range(12):
        rewards = data.rewards(i)
        for k, t in enumerate(data.trained(i)):
            out[t] = sum(gamma**j * r for j, r in enumerate(rewards[k:]))
    return out


def grpo(data: Data) -> Expected:
    """arXiv 2402.03300, section 4.1."""
    return by_response(
        data, lambda r, i: (r[i] - statistics.mean(r)) / (statistics.stdev(r) + 1e-6)
    )


def grpo_passk(data: Data) -> Expected:
    """arXiv 2503.19595: max of all - max of the others, over the deviation."""
    return by_response(
        data,
        lambda r, i: (max(r) - max(r[:i] + r[i + 1 :])) / (statistics.stdev(r) + 1e-6),
    )


def rloo(data: Data) -> Expected:
    """arXiv 2402.14740, equation 4."""
    return by_response(data, lambda r, i: r[i] - statistics.mean(r[:i] + r[i + 1 :]))


def opo(data: Data) -> Expected:
    """arXiv 2505.23585, equation 9: sum of l r / sum of l."""
    out = {}
    for i in range(12):
        group = data.group(i)
        lengths = [len(data.trained(j)) for j in group]
        weighted = sum(n * data.total(j) for n, j in zip(lengths, group, strict=True))
        baseline = weighted / sum(lengths) if len(group) > 1 else 0.0
        out |= dict.fromkeys(data.trained(i), data.total(i) - baseline)
    return out


def reinforce_plus_plus(data: Data) -> Expected:
    """arXiv 2501.03262, section 3.2."""
    return whitened(to_go(data, GAMMA))


def reinforce_plus_plus_baseline(data: Data) -> Expected:
    """arXiv 2501.03262, section 3.3."""
    return whitened(by_response(data, lambda r, i: r[i] - statistics.mean(r)))


def remax(data: Data) -> Expected:
    """arXiv 2310.10505, equation 5."""
    baseline = {t: float(data.baselines[i]) for i in range(12) for t in data.trained(i)}
    return {t: value - baseline[t] for t, value in to_go(data, 1.0).items()}


def gae(data: Data) -> Expected:
    """arXiv 1506.02438, equation 16."""
    raw = {}
    for i in range(12):
        at = data.trained(i)
        values = [float(data.values[t]) for t in at] + [0.0]
        errors = [r + GAMMA * values[k + 1] - values[k] for k, r in enumerate(data.rewards(i))]
        for k, t in enumerate(at):
            raw[t] = sum((GAMMA * LAM) ** j * error for j, error in enumerate(errors[k:]))
    return whitened(raw)


PLAIN: dict[Estimator, Callable[[Data], Expected]] = {
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "opo": opo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gae": gae,
}


def test_the_schema_the_estimators_and_their_references_have_the_same_names() -> None:
    assert set(get_args(AdvEstimator)) == set(get_args(Estimator)) == set(PLAIN)


@pytest.mark.parametrize("name", get_args(Estimator))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_advantages_are_those_of_the_paper(name: Estimator, seed: int) -> None:
    data = Data(seed)
    expected = PLAIN[name](data)
    made = data.call(name)
    assert sorted(expected) == data.mask.nonzero().squeeze(1).tolist()
    assert made[~data.mask].eq(0).all()
    for t, value in expected.items():
        # float32 columns of values of order 1
        assert made[t].item() == pytest.approx(value, abs=1e-6, rel=1e-6), t


def test_pass_k_reinforces_no_response_when_two_are_best() -> None:
    data = Data(0)
    data.scores[7:11] = torch.tensor([0.0, 1.0, 1.0, 0.0])
    made = compute_advantages(
        "grpo_passk",
        scores=data.scores,
        groups=data.groups,
        mask=data.mask,
        sequence=data.sequence,
    )
    of = (data.sequence >= 7) & (data.sequence < 11)
    assert made.advantages[of].eq(0).all()


def test_remax_without_baselines_is_named() -> None:
    data = Data(0)
    with pytest.raises(ValueError, match="remax needs baselines"):
        compute_advantages(
            "remax",
            scores=data.scores,
            groups=data.groups,
            mask=data.mask,
            sequence=data.sequence,
        )
