"""The step's loss and its gradient are the same however the batch was cut, and what each mode's
name says.
"""

from __future__ import annotations

import pytest
import torch

from trainer.algorithms import aggregate, token_weights

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
COUNTS = [10, 6, 0, 1, 3]
"""Trained tokens of each sequence; one has none."""
SEQUENCE = torch.repeat_interleave(torch.arange(5), torch.tensor(COUNTS) + 2)
MASK = torch.cat([torch.arange(c + 2) >= 2 for c in COUNTS])
LOSSES = torch.randn(len(MASK), generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def weights(mode: str) -> torch.Tensor:
    return token_weights(mode, MASK, SEQUENCE, 5, max_response_length=32)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_is_what_its_name_says(mode: str) -> None:
    rows = [LOSSES[MASK & (i == SEQUENCE)] for i in range(5) if COUNTS[i]]
    expected = {
        "token-mean": torch.cat(rows).mean(),
        "seq-mean-token-mean": torch.stack([r.mean() for r in rows]).mean(),
        "seq-mean-token-sum": torch.stack([r.sum() for r in rows]).mean(),
        "seq-mean-token-sum-norm": torch.stack([r.sum() / 32 for r in rows]).mean(),
    }[mode]
    torch.testing.assert_close(aggregate(LOSSES, weights(mode)), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "cut", [[[0, 1, 2, 3, 4]], [[3], [0], [4, 1], [2]], [[2, 4], [], [1, 3, 0], []]], ids=str
)
def test_gradient_does_not_depend_on_the_cut(mode: str, cut: list[list[int]]) -> None:
    """Empty micro-batches are fillers. The whole batch in float64 is the reference."""
    x = torch.linspace(-1, 1, len(MASK), dtype=torch.float64)
    theta = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (torch.sin(theta * x) * weights(mode).double()).sum().backward()
    assert theta.grad is not None
    split = torch.tensor(0.3, requires_grad=True)
    w = weights(mode)
    for part in cut:
        indices = torch.cat(
            [torch.nonzero(i == SEQUENCE)[:, 0] for i in part]
            or [torch.empty(0, dtype=torch.int64)]
        )
        aggregate(torch.sin(split * x[indices].float()), w[indices]).backward()
    assert split.grad is not None
    torch.testing.assert_close(split.grad.double(), theta.grad, atol=1e-6, rtol=1e-6)


def test_a_mean_per_micro_batch_would_differ() -> None:
    """The textbook mistake with 10 and 6 tokens, so that the test above is known to see it."""
    a, b = LOSSES[:10], LOSSES[10:16]
    assert not torch.isclose((a.mean() + b.mean()) / 2, torch.cat([a, b]).mean())


@pytest.mark.parametrize("mode", MODES)
def test_no_trained_tokens_is_a_zero_loss_with_a_backward(mode: str) -> None:
    nothing = torch.zeros(4, dtype=torch.bool)
    w = token_weights(mode, nothing, torch.tensor([0, 0, 1, 1]), 2, max_response_length=8)  # type: ignore[arg-type]
    theta = torch.tensor(2.0, requires_grad=True)
    loss = aggregate(theta * torch.ones(4), w)
    loss.backward()
    assert loss.item() == 0
    assert theta.grad is not None and theta.grad.item() == 0


def test_counts_of_other_ranks_can_be_given() -> None:
    half = SEQUENCE < 2
    half_weights = token_weights(
        "token-mean", MASK[half], SEQUENCE[half], 2, global_tokens=20, global_sequences=4
    )
    torch.testing.assert_close(half_weights, weights("token-mean")[half])


def test_untrained_tokens_add_nothing_even_if_infinite() -> None:
    losses = LOSSES.masked_fill(~MASK, torch.inf)
    torch.testing.assert_close(aggregate(losses, weights("token-mean")), LOSSES[MASK].mean())


def test_wrong_calls_are_named() -> None:
    with pytest.raises(ValueError, match="is none of token-mean"):
        weights("mean")
    with pytest.raises(ValueError, match="needs max_response_length"):
        token_weights("seq-mean-token-sum-norm", MASK, SEQUENCE, 5)
