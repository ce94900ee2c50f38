"""What a user would lose: a document that sees its neighbour, a prompt shared wrongly, a gradient
that differs.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.support import (
    FAMILIES,
    GROUPED,
    distance,
    gradient,
    make_batch,
    make_model,
    reference,
    run,
)
from trainer.base.errors import UserError
from trainer.models import Packed, pack, pad, token_stats
from trainer.models.attention_cpu import cpu_attention, make_plan
from trainer.models.attention_cuda import segment_attention
from trainer.models.layout import Layout, Segment


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_shared_and_padded_equal_one_document_at_a_time(family: str) -> None:
    batch = make_batch(*GROUPED)
    plain = make_model(family, packed=False)
    expected = reference(plain, batch, 0.7)
    expected_gradient = gradient(plain, expected)
    model = make_model(family)
    for packed in (pack(batch), pack(batch, share_prompts=True), pad(batch), pad(batch, to=60)):
        stats, grad = run(model, packed)
        assert stats.entropy is not None and expected.entropy is not None
        torch.testing.assert_close(stats.log_probs, expected.log_probs, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(stats.entropy, expected.entropy, atol=2e-5, rtol=1e-5)
        assert distance(grad, expected_gradient) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pad_token_is_trained_as_any_other(family: str) -> None:
    """Where it is the end token, responses hold it; transformers gives its row no gradient."""
    batch = make_batch(*GROUPED)
    batch.columns["input_ids"][::3] = 1
    plain = make_model(family, packed=False)
    expected = gradient(plain, reference(plain, batch, 0.7))
    padded = make_model(family, pad=1)
    padded.load_state_dict(plain.state_dict())
    stats = token_stats(padded, pack(batch), entropy=True, temperature=0.7)
    assert distance(gradient(padded, stats), expected) < 1e-5
    row = padded.get_input_embeddings().weight.grad[1]  # type: ignore[operator, union-attr, index]
    expected_row = plain.get_input_embeddings().weight.grad[1]  # type: ignore[operator, union-attr, index]
    assert expected_row.norm() > 0 and distance(row, expected_row) < 1e-5


def test_a_shared_prompt_is_held_once() -> None:
    batch = make_batch([0] * 8, [30] * 8, [10] * 8)
    assert pack(batch).num_tokens == 8 * 40
    assert pack(batch, share_prompts=True).num_tokens == 30 + 8 * 10
    assert pad(batch, to=64).num_tokens == 8 * 64


def test_prompts_are_shared_only_when_their_tokens_are_equal() -> None:
    batch = make_batch([0, 0], [6, 6], [3, 3])
    batch.columns["input_ids"][0] = (batch.columns["input_ids"][0] + 1) % 97
    assert pack(batch, share_prompts=True).num_tokens == pack(batch).num_tokens
    model = make_model()
    a, b = (token_stats(model, pack(batch, share_prompts=s)).log_probs for s in (False, True))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_targets_are_indices_into_the_flat_columns() -> None:
    batch = make_batch([0, 0], [2, 2], [2, 1])
    for packed in (pack(batch), pack(batch, share_prompts=True), pad(batch)):
        assert packed.targets.tolist() == [2, 3, 6]
        assert torch.equal(packed.target_ids, batch.columns["input_ids"][packed.targets])
    assert pack(batch, all_tokens=True).targets.tolist() == [1, 2, 3, 5, 6]
    batch.columns["loss_mask"][:] = True
    assert pack(batch, share_prompts=True).targets.tolist() == [1, 2, 3, 5, 6]


def test_trained_prompt_tokens_survive_sharing() -> None:
    batch = make_batch([0, 0, 0], [5, 5, 5], [4, 2, 3])
    model = make_model()
    (a, ga), (b, gb) = (
        run(model, pack(batch, share_prompts=s, all_tokens=True)) for s in (False, True)
    )
    torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-5, rtol=1e-5)
    assert distance(gb, ga) < 1e-5


def test_a_filler_reaches_every_parameter_with_nothing() -> None:
    model = make_model()
    filler = pack(make_batch([0], [3], [2]).select([]))
    stats, _ = run(model, filler)
    assert stats.log_probs.shape == (0,)
    for name, p in model.named_parameters():
        assert p.grad is not None and not p.grad.any(), name


def test_two_tokens_that_do_not_exist_are_refused() -> None:
    batch = make_batch([0], [3], [2])
    for bad in (97, -1):
        batch.columns["input_ids"][2] = bad
        with pytest.raises(
            UserError, match=rf"token id {bad} is outside the model's vocabulary \(ids 0 to 96\)"
        ):
            token_stats(make_model(), pack(batch))


def test_generation_is_untouched_by_training() -> None:
    batch = make_batch(*GROUPED)
    plain, model = make_model("qwen2", packed=False), make_model("qwen2")
    prompt = batch.columns["input_ids"][:5][None]
    left = torch.cat([torch.zeros(1, 2, dtype=torch.int64), prompt[:, :3]], 1)
    inputs = {
        "input_ids": torch.cat([prompt, left]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
    }
    kwargs = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = plain.generate(**inputs, **kwargs)  # type: ignore[operator]
    for _ in range(2):
        run(model, pack(batch, share_prompts=True))
        model.eval()
        assert torch.equal(model.generate(**inputs, **kwargs), expected)  # type: ignore[operator]
    assert model(input_ids=prompt).logits.shape == (1, 5, 97)


def test_recomputed_activations_give_the_same_gradient() -> None:
    batch = make_batch(*GROUPED)
    model = make_model()
    _, expected = run(model, pack(batch, share_prompts=True))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model.eval()  # as a generator leaves it
    calls: list[int] = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))  # type: ignore[union-attr,index]
    _, grad = run(model, pack(batch, share_prompts=True))
    assert len(calls) == 2, "the layer was not recomputed"
    assert torch.equal(grad, expected)


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_is_near(autocast: bool) -> None:
    batch = make_batch(*GROUPED)
    model = make_model("qwen3")
    exact, exact_gradient = run(model, pack(batch))
    if not autocast:
        model = model.to(torch.bfloat16)
    for share in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            stats, grad = run(model, pack(batch, share_prompts=share))
        assert stats.log_probs.dtype == torch.float32
        assert distance(stats.log_probs, exact.log_probs) < 2e-2
        assert distance(grad, exact_gradient) < 5e-2


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(1, 40), min_size=1, max_size=4)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**31),
)
def test_cpu_attention_equals_one_call_per_segment(
    families: list[tuple[int, list[int]]], seed: int
) -> None:
    segments, at = [], 0
    for prefix, lengths in families:
        behind = (at, prefix) if prefix else (0, 0)
        for n, prefix_of in ([(prefix, (0, 0))] if prefix else []) + [(n, behind) for n in lengths]:
            segments.append(Segment(at, n, *prefix_of))
            at += n
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(at, 4, 8, generator=g).requires_grad_()
    k, v = (torch.randn(at, 2, 8, generator=g).requires_grad_() for _ in range(2))
    weights = torch.randn(at, 4, 8, generator=g)
    layout = Layout(tuple(segments))
    results = []
    for backend in (segment_attention, cpu_attention):
        out = backend(q, k, v, layout, 0.3)
        results.append((out.detach(), *torch.autograd.grad((out * weights).sum(), (q, k, v))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


def test_like_lengths_share_a_call_and_long_ones_do_not() -> None:
    def calls(lengths: list[int]) -> int:
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return len(
            make_plan(tuple(Segment(s, n) for s, n in zip(starts, lengths, strict=False))).buckets
        )

    assert calls([20, 31, 25, 18, 30] * 20) <= 2
    assert calls([2000, 1000, 30]) == 3


def test_packed_moves_as_a_whole() -> None:
    packed: Packed = pad(make_batch([0], [3], [2])).to("meta")
    moved = (
        packed.input_ids,
        packed.position_ids,
        packed.sources,
        packed.target_ids,
        packed.attention_mask,
    )
    assert all(x is not None and x.device.type == "meta" for x in moved)
    assert packed.targets.device.type == "cpu"
