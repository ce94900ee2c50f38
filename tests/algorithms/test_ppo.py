"""PPO's advantages and value loss are those of the papers, written as plainly as they stand there,
on random ragged data with a tool's answers between trained tokens.
"""

from __future__ import annotations

import random

import pytest
import torch

from trainer.algorithms import compute_advantages, sequence_index, value_loss


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.97, 0.9), (0.9, 0.0)])
def test_gae_is_equation_16(gamma: float, lam: float) -> None:
    """A(t) = sum over l of (gamma lam)^l delta(t + l), arXiv 1506.02438."""
    draw = torch.Generator().manual_seed(3)
    plain = random.Random(3)
    lengths = [plain.randint(1, 12) for _ in range(9)]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    total = int(bounds[-1])
    mask = torch.rand(total, generator=draw) < 0.7
    values = torch.randn(total, generator=draw)
    kl = torch.rand(total, generator=draw)
    scores = torch.randn(len(lengths), generator=draw)
    expected: dict[int, float] = {}
    for row, (start, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        steps = [t for t in range(start, end) if mask[t]]
        reward = [-0.1 * float(kl[t]) for t in steps]
        if steps:
            reward[-1] += float(scores[row])
        value = [float(values[t]) for t in steps] + [0.0]
        delta = [r + gamma * value[i + 1] - value[i] for i, r in enumerate(reward)]
        for i, t in enumerate(steps):
            expected[t] = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
    made = compute_advantages(
        "gae",
        scores=scores,
        groups=torch.arange(len(lengths)),
        mask=mask,
        sequence=sequence_index(bounds),
        values=values,
        kl=kl,
        kl_coef=0.1,
        gamma=gamma,
        lam=lam,
    )
    trained = sorted(expected)
    raw = torch.tensor([expected[t] for t in trained], dtype=torch.float64)
    white = (raw - raw.mean()) / (raw.var() + 1e-8).sqrt()
    returns = raw + values[trained].double()
    torch.testing.assert_close(made.advantages[trained].double(), white, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(made.returns[trained].double(), returns, atol=1e-6, rtol=1e-6)
    assert not made.advantages[~mask].any() and not made.returns[~mask].any()


def test_the_value_loss_is_the_larger_of_the_plain_and_the_held_error() -> None:
    """arXiv 2005.12729, section 3, with its gradient: none where the held value counts and is out
    of its range.
    """
    draw = torch.Generator().manual_seed(4)
    values, old, returns = (torch.randn(200, generator=draw) for _ in range(3))
    values.requires_grad_()
    made = value_loss(values, old, returns, clip_range=0.3)
    made.losses.sum().backward()
    clipped = 0
    plain_values = values.detach()
    for i in range(200):
        new, was, target = float(plain_values[i]), float(old[i]), float(returns[i])
        held = min(max(new, was - 0.3), was + 0.3)
        plain_error, held_error = (new - target) ** 2, (held - target) ** 2
        clipped += held_error > plain_error
        loss = 0.5 * max(plain_error, held_error)
        slope = 0.0 if held_error > plain_error and held != new else new - target
        assert float(made.losses[i]) == pytest.approx(loss, abs=1e-6, rel=1e-5)
        assert float(values.grad[i]) == pytest.approx(slope, abs=1e-6)  # type: ignore[index]
    assert 20 < clipped < 180
    assert made.sums["vf_clipfrac"] == clipped and made.sums["tokens"] == 200
