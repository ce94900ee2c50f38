"""The chunked head: exact values, exact gradients, and never a [tokens, vocabulary] tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.support import make_batch, make_model, run
from trainer.models import pack
from trainer.models.head import HeadRequest, default_chunk, make_token_head


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_give_the_whole_softmax(chunk: int, temperature: float) -> None:
    g = torch.Generator().manual_seed(0)
    head = make_token_head(nn.Linear(12, 31, bias=False)).double()
    hidden = torch.randn(1, 9, 12, generator=g, dtype=torch.float64).requires_grad_()
    sources = torch.tensor([0, 1, 1, 8, 3, 1])
    targets = torch.tensor([30, 0, 4, 4, 17, 0])
    weights = torch.randn(6, 2, generator=g)
    with head.answering(HeadRequest(sources, targets, temperature, True, chunk)):
        out = head(hidden)
    got = torch.autograd.grad((out * weights).sum(), (hidden, head.weight))
    logp = torch.log_softmax(head(hidden)[0, sources] / temperature, -1)
    expected = torch.stack(
        (logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)), 1
    )
    torch.testing.assert_close(out, expected.float(), atol=1e-6, rtol=1e-5)
    wanted = torch.autograd.grad((expected * weights).sum(), (hidden, head.weight))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_entropy_is_free_of_gradient_when_not_asked() -> None:
    model = make_model()
    batch = make_batch([0], [3], [9])
    with_entropy, _ = run(model, pack(batch))
    without, _ = run(model, pack(batch), entropy=False)
    assert without.entropy is None
    assert torch.equal(with_entropy.log_probs, without.log_probs)


@pytest.mark.parametrize("entropy", [False, True])
def test_the_logits_never_exist_whole(entropy: bool) -> None:
    vocab, tokens = 4000, 512
    model = make_model(vocab=vocab)
    batch = make_batch([0] * 4, [8] * 4, [120] * 4, vocab=vocab)
    with Largest() as seen:
        run(model, pack(batch), entropy=entropy, chunk_tokens=16)
    # The flat gradient that the test itself makes is the largest thing; half of the logits would be
    # three times that.
    assert seen.elements == sum(p.numel() for p in model.parameters()) < tokens * vocab / 6


def test_default_chunk_bounds_the_logits() -> None:
    assert default_chunk(512) == 4096
    assert default_chunk(151_936) == 220
    assert default_chunk(49_152, "cpu") == 170
    assert default_chunk(10**7) == 64


def test_a_head_that_is_no_plain_projection_is_refused() -> None:
    with pytest.raises(TypeError, match="without bias"):
        make_token_head(nn.Linear(2, 3))
