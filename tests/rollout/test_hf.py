"""The engine ``hf`` against transformers' generate, whole forward passes, and other batch sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.support import VOCAB, make_model
from tests.rollout.support import PROMPTS, generate_samples, ids
from trainer.base.errors import UserError
from trainer.data.batch import Batch
from trainer.models import pack, token_stats
from trainer.rollout import NotFiniteError, Sampling


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_is_transformers_greedy(family: str) -> None:
    model = make_model(family)
    eos = list(range(1, 8))
    samples = generate_samples(model, eos=eos, do_sample=False, max_response_length=20)
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        expected = model.generate(  # type: ignore[operator]
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=eos,
            pad_token_id=0,
        )[0, len(prompt) :]
        assert sample.response_ids.tolist() == expected.tolist()
        assert sample.finished == (int(expected[-1]) in eos)


@pytest.mark.parametrize(
    "settings", [{}, {"top_k": 5}, {"top_p": 0.7}, {"do_sample": False}], ids=str
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_a_whole_forward_pass(
    settings: dict[str, Any], temperature: float
) -> None:
    model = make_model()
    for prompt, sample in zip(
        PROMPTS, generate_samples(model, temperature=temperature, **settings), strict=True
    ):
        whole = torch.tensor([prompt + sample.response_ids.tolist()])
        with torch.no_grad():
            logits = model(input_ids=whole, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = (
            (logits / temperature).log_softmax(-1).gather(1, sample.response_ids[:, None])[:, 0]
        )
        torch.testing.assert_close(sample.log_probs, expected, atol=1e-4, rtol=0)


def test_log_probs_are_those_of_training() -> None:
    """The importance ratio of the first optimizer step is 1 only if generation and the packed pass
    agree.
    """
    model = make_model()
    samples = generate_samples(model, temperature=0.8)
    sequences = [
        torch.tensor(p + s.response_ids.tolist()) for p, s in zip(PROMPTS, samples, strict=True)
    ]
    masks = [torch.arange(len(s)) >= len(p) for p, s in zip(PROMPTS, sequences, strict=True)]
    rows = {
        "prompt_lengths": torch.tensor([len(p) for p in PROMPTS]),
        "groups": torch.arange(len(PROMPTS)),
    }
    batch = Batch.from_sequences({"input_ids": sequences, "loss_mask": masks}, rows)
    trained = token_stats(model, pack(batch), temperature=0.8).log_probs
    torch.testing.assert_close(
        torch.cat([s.log_probs for s in samples]), trained, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_samples_do_not_depend_on_the_batch(rows: int) -> None:
    model = make_model()
    whole = generate_samples(model, eos=list(range(1, 9)))
    cut = generate_samples(model, eos=list(range(1, 9)), max_num_seqs=rows)
    assert ids(cut) == ids(whole)
    assert len({len(s.response_ids) for s in whole}) > 2, (
        "sequences of one length would not test the compaction"
    )
    for a, b in zip(cut, whole, strict=True):
        torch.testing.assert_close(a.log_probs, b.log_probs, atol=1e-4, rtol=0)


def test_a_part_of_the_prompts_gives_the_same_samples() -> None:
    """As with another number of ranks."""
    model = make_model()
    whole = generate_samples(model)
    part = generate_samples(model, [PROMPTS[i] for i in (4, 1, 6)], [4, 1, 6])
    assert ids(part) == [ids(whole)[i] for i in (4, 1, 6)]


def test_a_repetition_is_bit_equal_and_other_steps_and_seeds_differ() -> None:
    model = make_model()
    first = generate_samples(model)
    again = generate_samples(model)
    assert ids(first) == ids(again)
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(first, again, strict=True))
    assert ids(generate_samples(model, step=4)) != ids(first)
    assert ids(generate_samples(model, seed=18)) != ids(first)


def test_samples_of_one_prompt_differ() -> None:
    responses = ids(generate_samples(make_model(), [[5, 9, 3]] * 8))
    assert len({tuple(r) for r in responses}) == 8


def test_stops_at_an_end_token_and_only_there() -> None:
    eos = list(range(1, 12))
    samples = generate_samples(make_model(), [[i + 20] for i in range(30)], eos=eos)
    assert {s.finished for s in samples} == {True, False}
    for s in samples:
        ends = [i for i, token in enumerate(s.response_ids.tolist()) if token in eos]
        assert ends == ([len(s.response_ids) - 1] if s.finished else [])
        assert s.finished or len(s.response_ids) == 12
        assert s.log_probs.shape == s.response_ids.shape


def test_the_cache_grows_beyond_its_first_capacity_and_a_block_of_random_numbers() -> None:
    model = make_model()
    sample = generate_samples(model, [[5, 9, 3], [8]], eos=[VOCAB + 5], max_response_length=300)[0]
    whole = torch.tensor([[5, 9, 3, *sample.response_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=whole, use_cache=False).logits[0, 2:-1]
    expected = logits.log_softmax(-1).gather(1, sample.response_ids[:, None])[:, 0]
    torch.testing.assert_close(sample.log_probs, expected, atol=1e-3, rtol=0)
    assert len(sample.response_ids) == 300


@pytest.mark.parametrize("do_sample", [True, False])
def test_tokens_sampled_in_several_passes_are_the_same(
    monkeypatch: pytest.MonkeyPatch, do_sample: bool
) -> None:
    model = make_model()
    whole = generate_samples(model, do_sample=do_sample)
    monkeypatch.setattr("trainer.rollout.hf.sampling.SAMPLING_ELEMENTS", {"cpu": 2 * VOCAB})
    assert ids(generate_samples(model, do_sample=do_sample)) == ids(whole)


def test_prompts_prefilled_in_several_passes_give_the_same_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make_model()
    whole = generate_samples(model)
    monkeypatch.setattr("trainer.rollout.hf.prefill.PREFILL_TOKENS", 8)
    assert ids(generate_samples(model)) == ids(whole)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_not_changed(training: bool) -> None:
    model = make_model().train(training)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    generate_samples(model)
    assert model.training is training
    assert model.config._attn_implementation == before  # type: ignore[union-attr]
    model(input_ids=torch.tensor([[3, 4]]), use_cache=False).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_with_nan_is_an_error_and_its_mode_is_restored() -> None:
    model = make_model().train()
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(NotFiniteError, match="not finite"):
        generate_samples(model)
    assert model.training


def test_no_prompts_no_samples() -> None:
    assert generate_samples(make_model(), []) == []


def test_bad_input_is_named() -> None:
    model = make_model()
    with pytest.raises(UserError, match="prompt 1 of the batch is empty"):
        generate_samples(model, [[3], []])
    with pytest.raises(
        UserError,
        match=r"exceed the 512 tokens of the model \(max_position_embeddings\); "
        r"lower data\.max_prompt_length",
    ):
        generate_samples(model, [[3] * 501])
    with pytest.raises(UserError, match=r"rollout\.top_p=0: must be above 0"):
        Sampling(max_response_length=3, top_p=0)
    with pytest.raises(UserError, match=r"rollout\.response_length=0"):
        Sampling(max_response_length=0)
