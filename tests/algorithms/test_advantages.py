"""Advantages against plain loops over padded rows, as the papers write them."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from torch import Tensor

from trainer.algorithms import compute_advantages, grpo, rloo, sequence_index
from trainer.algorithms.advantages import discounted, token_rewards

GROUPS = torch.tensor([7, 7, 3, 7, 3, 9])
SCORES = torch.tensor([1.0, 0.0, 0.5, 0.25, -0.5, 2.0])
LENGTHS = torch.tensor([5, 3, 4, 6, 2, 1])
CU = torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)])
SEQUENCE = sequence_index(CU)
MASK = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1]).bool()
"""Sequence 2 is fully masked, sequence 3 has a gap."""


def of_group(i: int) -> list[float]:
    return [s for s, g in zip(SCORES.tolist(), GROUPS.tolist(), strict=True) if g == GROUPS[i]]


def trained(i: int) -> list[int]:
    return [t for t in range(int(CU[i]), int(CU[i + 1])) if MASK[t]]


@pytest.mark.parametrize("norm", [True, False])
def test_grpo(norm: bool) -> None:
    expected = []
    for i, score in enumerate(SCORES.tolist()):
        group = of_group(i)
        if len(group) == 1:
            expected.append(score)
        else:
            centred = score - statistics.mean(group)
            expected.append(centred / (statistics.stdev(group) + 1e-6) if norm else centred)
    torch.testing.assert_close(grpo(SCORES, GROUPS, norm_by_std=norm), torch.tensor(expected))


def test_a_group_of_equal_scores_teaches_exactly_nothing() -> None:
    assert grpo(torch.full((7,), 0.1), torch.zeros(7, dtype=torch.int64)).eq(0).all()


def test_rloo() -> None:
    expected = []
    for i, score in enumerate(SCORES.tolist()):
        group = of_group(i)
        others = (sum(group) - score) / (len(group) - 1) if len(group) > 1 else 0.0
        expected.append(score - others)
    torch.testing.assert_close(rloo(SCORES, GROUPS), torch.tensor(expected))


def test_order_of_sequences_does_not_matter() -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(grpo(SCORES[order], GROUPS[order]), grpo(SCORES, GROUPS)[order])


def test_token_rewards_stand_at_the_last_trained_token() -> None:
    kl = torch.arange(21.0)
    rewards = token_rewards(SCORES, MASK, SEQUENCE, kl, 0.5)
    for i, score in enumerate(SCORES.tolist()):
        for t in range(int(CU[i]), int(CU[i + 1])):
            expected = (-0.5 * t + (score if t == trained(i)[-1] else 0.0)) if MASK[t] else 0.0
            assert rewards[t].item() == pytest.approx(expected)


def test_discounted_is_the_plain_recursion() -> None:
    g = torch.Generator().manual_seed(0)
    for counts in ([3, 0, 5, 1, 5], [1], [0, 0, 2], []):
        sequence = torch.repeat_interleave(
            torch.arange(len(counts)), torch.tensor(counts, dtype=torch.int64)
        )
        values = torch.randn(sum(counts), generator=g, dtype=torch.float64)
        expected = values.clone()
        for t in range(len(values) - 2, -1, -1):
            if sequence[t] == sequence[t + 1]:
                expected[t] += 0.9 * expected[t + 1]
        torch.testing.assert_close(discounted(values, sequence, len(counts), 0.9), expected)


def whitened(values: list[float]) -> list[float]:
    mean, var = statistics.mean(values), statistics.variance(values)
    return [(v - mean) / math.sqrt(var + 1e-8) for v in values]


def test_gae_and_reinforce_plus_plus() -> None:
    values = torch.randn(21, generator=torch.Generator().manual_seed(2))
    kl = torch.rand(21, generator=torch.Generator().manual_seed(3))
    rewards = token_rewards(SCORES, MASK, SEQUENCE, kl, 0.1)
    gamma, lam = 0.97, 0.9
    raw: dict[int, float] = {}
    to_go: dict[int, float] = {}
    for i in range(6):
        running, after, value_after = 0.0, 0.0, 0.0
        for t in reversed(trained(i)):
            delta = float(rewards[t]) + gamma * value_after - float(values[t])
            running = delta + gamma * lam * running
            after = float(rewards[t]) + gamma * after
            value_after, raw[t], to_go[t] = float(values[t]), running, after
    indices = sorted(raw)
    common = {
        "scores": SCORES,
        "groups": GROUPS,
        "mask": MASK,
        "sequence": SEQUENCE,
        "kl": kl,
        "kl_coef": 0.1,
    }
    made = compute_advantages("gae", values=values, gamma=gamma, lam=lam, **common)  # type: ignore[arg-type]
    check(made.advantages, indices, whitened([raw[t] for t in indices]))
    check(made.returns, indices, [raw[t] + float(values[t]) for t in indices])
    made = compute_advantages("reinforce_plus_plus", gamma=gamma, **common)  # type: ignore[arg-type]
    check(made.advantages, indices, whitened([to_go[t] for t in indices]))
    check(made.returns, indices, [to_go[t] for t in indices])


def check(flat: Tensor, indices: list[int], expected: list[float]) -> None:
    assert flat[~MASK].eq(0).all()
    torch.testing.assert_close(flat[indices], torch.tensor(expected), atol=1e-5, rtol=1e-5)


def test_grpo_on_tokens_compares_scores_with_the_kl_taken_off() -> None:
    kl = torch.rand(21, generator=torch.Generator().manual_seed(3))
    made = compute_advantages(
        "grpo", scores=SCORES, groups=GROUPS, mask=MASK, sequence=SEQUENCE, kl=kl, kl_coef=0.1
    )
    totals = torch.tensor(
        [float(s) - 0.1 * sum(float(kl[t]) for t in trained(i)) for i, s in enumerate(SCORES)]
    )
    expected = grpo(totals, GROUPS)
    for i in range(6):
        for t in range(int(CU[i]), int(CU[i + 1])):
            assert made.advantages[t].item() == pytest.approx(
                expected[i].item() if MASK[t] else 0.0, abs=1e-6
            )


def test_wrong_calls_are_named() -> None:
    common = {"scores": SCORES, "groups": GROUPS, "mask": MASK, "sequence": SEQUENCE}
    with pytest.raises(ValueError, match="gae needs values"):
        compute_advantages("gae", **common)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'ppo' is none of grpo, grpo_passk"):
        compute_advantages("ppo", **common)  # type: ignore[arg-type]
