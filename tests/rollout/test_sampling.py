"""Sampled tokens follow the distribution; truncation is that of transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from trainer.rollout.hf.sampling import invert_cdf, truncate, uniforms


def test_random_numbers_depend_on_seed_step_sample_and_position_alone() -> None:
    whole = uniforms(7, 3, [0, 5, 9], 0, 64)
    assert torch.equal(uniforms(7, 3, [5], 0, 64)[0], whole[1])
    assert torch.equal(uniforms(7, 3, [9, 0], 16, 8), whole[[2, 0]][:, 16:24])
    everything = torch.cat(
        [uniforms(s, t, range(50), 0, 8).flatten() for s in (0, 1) for t in (0, 1)]
    )
    assert len(set(everything.tolist())) == everything.numel()
    assert everything.min() > 0
    assert everything.max() < 1


def test_random_numbers_are_uniform() -> None:
    u = uniforms(0, 0, range(200), 0, 256).flatten()
    counts = torch.histc(u.float(), 50, 0, 1).double()
    expected = u.numel() / 50
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001


def test_tokens_follow_the_softmax() -> None:
    scores = torch.tensor([0.0, 2.0, -1.0, -torch.inf, 1.0])
    n = 40_000
    tokens, _ = invert_cdf(
        scores.expand(n, 5), uniforms(3, 0, range(n // 256 + 1), 0, 256).flatten()[:n]
    )
    counts = torch.bincount(tokens, minlength=5).double()
    p = scores.double().softmax(0)
    assert counts[3] == 0
    live = p > 0
    assert ((counts - n * p) ** 2 / (n * p))[live].sum() < 16.3  # 3 degrees of freedom, p = 0.001


def test_the_ends_of_the_interval_give_possible_tokens() -> None:
    scores = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    assert invert_cdf(scores, torch.tensor([0.5 / 2**32], dtype=torch.float64))[0].item() == 1
    assert invert_cdf(scores, torch.tensor([1 - 0.5 / 2**32], dtype=torch.float64))[0].item() == 2


@pytest.mark.parametrize("top_k", [-1, 0, 1, 4, 50, 1000])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
def test_truncation_is_that_of_transformers(top_k: int, top_p: float) -> None:
    scores = torch.randn(40, 101, generator=torch.Generator().manual_seed(1)) * 3
    expected = scores
    if top_k > 0:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(truncate(scores, top_k, top_p), expected)


@pytest.mark.parametrize("vocabulary", [5, 128, 1000])
def test_tokens_are_those_of_one_plain_sum_and_never_impossible(vocabulary: int) -> None:
    """Blocks only matter at borders, and rounding never selects a token of probability 0."""
    draws = torch.Generator().manual_seed(vocabulary)
    scores = torch.randn(400, vocabulary, generator=draws) * 4
    scores[torch.rand(scores.shape, generator=draws) < 0.5] = -torch.inf
    scores[:, 2] = 0.0
    u = torch.rand(400, generator=draws, dtype=torch.float64)
    u[:50] = 0.5 / 2**32
    u[50:100] = 1 - 0.5 / 2**32
    token, norm = invert_cdf(scores, u)
    assert torch.isfinite(scores.gather(1, token[:, None])).all()
    torch.testing.assert_close(norm, scores.logsumexp(-1))
    cdf = scores.double().softmax(-1).cumsum(-1)
    upper = cdf.gather(1, token[:, None])[:, 0]
    lower = torch.where(token > 0, cdf.gather(1, (token[:, None] - 1).clamp(min=0))[:, 0], 0.0)
    assert (lower - 1e-6 <= u).all() and (u <= upper + 1e-6).all()
