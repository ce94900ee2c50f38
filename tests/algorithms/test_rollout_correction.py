"""Correction for the policy that sampled, against the plainest loops, and on a bandit whose
gradient is known.
"""

from __future__ import annotations

import math
import random
from typing import Any, get_args

import pytest
import torch

from trainer.algorithms.rollout_correction import (
    Rejection,
    Samples,
    importance_weights,
    kept_tokens,
    off_policy_metrics,
    rejection_metrics,
    weight_metrics,
)


def draw(seed: int) -> tuple[Samples, list[list[float]]]:
    """Ragged samples, and the log ratios of each sequence's trained tokens."""
    chance = random.Random(seed)
    old, rollout, mask, sequence = [], [], [], []
    ratios: list[list[float]] = []
    for number in range(7):
        ratios.append([])
        for position in range(chance.randrange(2, 9)):
            trained = position > 0 and number != 3  # one sequence has no trained token
            a, b = -3 * chance.random(), -3 * chance.random()
            old.append(a)
            rollout.append(b)
            mask.append(trained)
            sequence.append(number)
            if trained:
                ratios[-1].append(a - b)
    samples = Samples(
        old_log_probs=torch.tensor(old, dtype=torch.float64),
        rollout_log_probs=torch.tensor(rollout, dtype=torch.float64),
        mask=torch.tensor(mask),
        sequence=torch.tensor(sequence),
        sequences=7,
    )
    return samples, ratios


def flat(samples: Samples, by_token: Any) -> list[float]:
    """Values of trained tokens by ``by_token(sequence, position)``; 1 elsewhere."""
    values, seen = [], [0] * samples.sequences
    for number, trained in zip(samples.sequence.tolist(), samples.mask.tolist(), strict=True):
        values.append(by_token(number, seen[number]) if trained else 1.0)
        seen[number] += trained
    return values


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("normalize", [False, True])
def test_weights_are_truncated_ratios(seed: int, normalize: bool) -> None:
    samples, ratios = draw(seed)
    tokens = [[min(math.exp(x), 2.0) for x in row] for row in ratios]
    products = [min(math.exp(sum(row)), 2.0) for row in ratios]
    every = [x for row in tokens for x in row]
    used = [x for x, row in zip(products, ratios, strict=True) if row]
    mean_token = sum(every) / len(every) if normalize else 1.0
    mean_sequence = sum(used) / len(used) if normalize else 1.0
    for level, expected in (
        ("token", flat(samples, lambda s, t: tokens[s][t] / mean_token)),
        ("sequence", flat(samples, lambda s, t: products[s] / mean_sequence)),
    ):
        weights = importance_weights(
            samples,
            level,
            threshold=2.0,
            batch_normalize=normalize,  # type: ignore[arg-type]
        )
        torch.testing.assert_close(weights, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def is_kept(kind: str, row: list[float], position: int, lower: float, upper: float) -> bool:
    level, _, name = kind.rpartition("_")
    estimates = {
        "k1": [-x for x in row],
        "k2": [x * x / 2 for x in row],
        "k3": [math.exp(x) - 1 - x for x in row],
    }[name]
    value = {
        "token": estimates[position],
        "seq_sum": sum(estimates),
        "seq_mean": sum(estimates) / len(estimates),
        "seq_max": max(estimates),
    }[level]
    if name == "k1":
        return lower <= math.exp(value) <= upper
    return value <= upper


@pytest.mark.parametrize("kind", get_args(Rejection))
def test_what_is_too_far_away_is_left_out(kind: Rejection) -> None:
    left_out = 0
    asymmetric = 0
    for seed in range(5):
        samples, ratios = draw(seed)
        kept = kept_tokens(samples, kind, lower=0.5, upper=1.5)
        expected = flat(samples, lambda s, t, r=ratios: is_kept(kind, r[s], t, 0.5, 1.5))
        assert kept.tolist() == [bool(value) for value in expected]
        left_out += int((~kept).sum())
        mirrored = kept_tokens(samples, kind, lower=1 / 1.5, upper=2.0)
        asymmetric += int((kept != mirrored).sum())
        metrics = rejection_metrics(samples, kept)
        share = float((~kept).sum()) / float(samples.mask.sum())
        assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(share)
    assert left_out > 0 and asymmetric > 0


def test_metrics_of_equal_policies_and_of_different_ones() -> None:
    samples, ratios = draw(1)
    same = Samples(
        old_log_probs=samples.old_log_probs,
        rollout_log_probs=samples.old_log_probs,
        mask=samples.mask,
        sequence=samples.sequence,
        sequences=samples.sequences,
    )
    zero = off_policy_metrics(same)
    names = ("kl", "k3_kl", "log_ppl_diff", "chi2_token", "chi2_seq")
    assert all(zero[f"rollout_corr/{name}"] == 0.0 for name in names)
    every = [x for row in ratios for x in row]
    metrics = off_policy_metrics(samples)
    assert metrics["rollout_corr/kl"] == pytest.approx(-sum(every) / len(every))
    squares = sum(math.exp(2 * x) for x in every) / len(every)
    assert metrics["rollout_corr/chi2_token"] == pytest.approx(squares - 1)
    weights = importance_weights(samples, "token", threshold=1e9)
    size = sum(math.exp(x) for x in every) ** 2 / len(every) / sum(math.exp(2 * x) for x in every)
    found = weight_metrics(samples, weights)["rollout_corr/rollout_is_eff_sample_size"]
    assert found == pytest.approx(size, rel=1e-5)
    nothing = Samples(
        old_log_probs=torch.zeros(2),
        rollout_log_probs=torch.zeros(2),
        mask=torch.zeros(2, dtype=torch.bool),
        sequence=torch.zeros(2, dtype=torch.int64),
        sequences=1,
    )
    assert off_policy_metrics(nothing) == {} and bool(
        (importance_weights(nothing, "token", threshold=2.0, batch_normalize=True) == 1).all()
    )


def test_the_corrected_gradient_of_a_bandit_is_right_and_the_uncorrected_is_not() -> None:
    """Three arms: the policy gradient of the expected reward is p (r - E r) per logit. Samples come
    from another policy, one token each.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    sampler = torch.tensor([-0.4, 0.6, 0.1], dtype=torch.float64)
    rewards = torch.tensor([1.0, 0.0, 0.4], dtype=torch.float64)
    policy, other = logits.softmax(0), sampler.softmax(0)
    exact = policy * (rewards - policy @ rewards)
    n = 200_000
    arms = torch.multinomial(other, n, replacement=True, generator=generator)
    samples = Samples(
        old_log_probs=policy.log()[arms],
        rollout_log_probs=other.log()[arms],
        mask=torch.ones(n, dtype=torch.bool),
        sequence=torch.arange(n),
        sequences=n,
    )
    scores = torch.eye(3, dtype=torch.float64)[arms] - policy  # gradient of log p
    plain = scores * rewards[arms, None]
    for level in ("token", "sequence"):
        weights = importance_weights(samples, level, threshold=10.0)  # type: ignore[arg-type]
        corrected = plain * weights.double()[:, None]
        error = corrected.std(0) / math.sqrt(n)
        assert bool(((corrected.mean(0) - exact).abs() < 4 * error).all())
    error = plain.std(0) / math.sqrt(n)
    assert bool(((plain.mean(0) - exact).abs() > 4 * error).any())
