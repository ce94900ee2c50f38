"""Adapters against the formula written out, and everything that has to see through them: head,
generation, export.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from tests.models.support import GROUPED, distance, gradient, make_batch, make_model
from tests.rollout.support import PROMPTS, generate_samples
from trainer.base.errors import UserError
from trainer.models import load_model, pack, token_stats
from trainer.models.huggingface import write_folder
from trainer.models.lora import (
    Lora,
    adapter_of,
    adapters_off,
    add_adapters,
    digest,
    has_adapters,
    weights,
)
from trainer.parallel.weights import whole_weights
from trainer.rollout.log_prob_check import trainer_log_probs

FAMILIES = ("llama", "qwen2", "qwen3")


def adapted(family: str = "llama", *, trained: bool = True, **how: object) -> nn.Module:
    """A model with adapters; ``trained``: they have left 0."""
    model = make_model(family)
    add_adapters(model, Lora(**{"rank": 4, "alpha": 12.0, "seed": 3, **how}))  # type: ignore[arg-type]
    return train(model) if trained else model


def train(model: nn.Module) -> nn.Module:
    g = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.1)
    return model


def merged(model: nn.Module, family: str = "llama") -> nn.Module:
    """A model without adapters whose weights are W + alpha / rank B A, by the formula."""
    plain, held = make_model(family), dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            stem = name.removesuffix(".weight")
            if f"{stem}.lora_A.default.weight" in held:
                down, up = (held[f"{stem}.lora_{x}.default.weight"].double() for x in "AB")
                parameter.copy_(parameter.double() + 12 / 4 * (up @ down))
    return plain


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_the_merged_one(family: str) -> None:
    model, batch = adapted(family), make_batch(*GROUPED)
    plain = merged(model, family)
    with_adapters, expected = (token_stats(m, pack(batch), entropy=True) for m in (model, plain))
    torch.testing.assert_close(with_adapters.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    assert not torch.allclose(
        with_adapters.log_probs, token_stats(make_model(family), pack(batch)).log_probs, atol=1e-2
    )
    named = dict(plain.named_parameters())
    made = dict(whole_weights(model, sharded=False))
    assert list(made) == list(named), "names and order are those of a model without adapters"
    for name, tensor in made.items():
        torch.testing.assert_close(tensor, named[name].detach(), atol=1e-6, rtol=0)


def test_the_gradient_is_that_of_the_two_matrices_and_of_nothing_else() -> None:
    model, batch = adapted(), make_batch(*GROUPED)
    plain = merged(model)
    with_grad = gradient(model, token_stats(model, pack(batch), entropy=True))
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert (
        trained
        == {n for n, p in model.named_parameters() if p.requires_grad}
        == {n for n, _ in model.named_parameters() if ".lora_" in n}
    )
    gradient(plain, token_stats(plain, pack(batch), entropy=True))
    parts = []
    for weight in weights(model):
        if weight.adapter is not None:
            whole = dict(plain.named_parameters())[weight.name].grad
            assert whole is not None
            parts += [
                3 * (weight.adapter.up.T @ whole).flatten(),
                3 * (whole @ weight.adapter.down.T).flatten(),
            ]
    assert distance(with_grad, torch.cat(parts)) < 1e-5


def test_a_fresh_adapter_changes_nothing_and_depends_on_the_seed_alone() -> None:
    batch = make_batch(*GROUPED)
    one, again, other = (
        adapted(trained=False),
        adapted(trained=False),
        adapted(trained=False, seed=4),
    )
    assert torch.equal(
        token_stats(one, pack(batch)).log_probs, token_stats(make_model(), pack(batch)).log_probs
    )
    first, second, third = (dict(m.named_parameters()) for m in (one, again, other))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert any(not torch.equal(first[n], third[n]) for n in first)


def test_without_its_adapters_it_is_the_base_model_bit_for_bit() -> None:
    """The reference of the KL."""
    model, batch = adapted(), make_batch(*GROUPED)
    with torch.no_grad(), adapters_off(model) as base:
        off = token_stats(base, pack(batch)).log_probs
    assert torch.equal(off, token_stats(make_model(), pack(batch)).log_probs)
    assert not torch.equal(off, token_stats(model, pack(batch)).log_probs), "they are on again"
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_draws_from_the_merged_model(family: str) -> None:
    model = adapted(family)
    plain = merged(model, family)
    for prompt, sample in zip(PROMPTS, generate_samples(model, temperature=0.7), strict=True):
        for judge in (model, plain):
            wanted = trainer_log_probs(judge, prompt, sample.response_ids, temperature=0.7)
            torch.testing.assert_close(sample.log_probs, wanted, atol=1e-4, rtol=0)


def test_recomputed_activations_give_the_same_gradient() -> None:
    """The embedding is frozen: what enters the first layer has no gradient."""
    batch = make_batch(*GROUPED)
    gradients = []
    for recompute in (False, True):
        model = adapted()
        if recompute:
            model.gradient_checkpointing_enable(  # type: ignore[operator]
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        gradients.append(gradient(model, token_stats(model.train(), pack(batch), entropy=True)))
    assert distance(*gradients) < 1e-6 and gradients[0].norm() > 0


def test_chosen_layers_and_unknown_ones() -> None:
    model = adapted(targets=["q_proj", "down_proj"])
    names = {
        n.rsplit(".", 1)[-1] for n, layer in model.named_modules() if adapter_of(layer) is not None
    }
    assert (
        names == {"q_proj", "down_proj"} and has_adapters(model) and not has_adapters(make_model())
    )
    everything = {
        n.rsplit(".", 1)[-1]
        for n, layer in adapted().named_modules()
        if adapter_of(layer) is not None
    }
    assert everything == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }
    with pytest.raises(
        UserError, match=r"target_modules: .* named q_prj, lm_head, but q_proj, .*v_proj"
    ):
        adapted(targets=["q_prj", "lm_head", "v_proj"])


def test_the_digest_is_of_the_values_whatever_their_type() -> None:
    model = make_model()
    half = copy.deepcopy(model).to(torch.bfloat16)
    assert digest(half) == digest(copy.deepcopy(half).float()) == digest(model)
    with torch.no_grad():
        next(iter(model.parameters()))[3, 2] *= 1.1
    assert digest(half) != digest(model)


def test_bfloat16_is_rounded_once() -> None:
    model = train(
        load_model(
            "builtin:tiny", dtype=torch.bfloat16, device="cpu", adapters=Lora(rank=2, alpha=4)
        ).model
    )
    weight = next(w for w in weights(model) if w.adapter is not None)
    assert weight.adapter is not None and weight.adapter.up.dtype == torch.bfloat16
    exact = weight.base.double() + 2 * (weight.adapter.up.double() @ weight.adapter.down.double())
    assert weight.merged().dtype == torch.bfloat16
    assert (weight.merged() == exact.float().bfloat16()).float().mean() > 0.999


def test_the_exported_folder_holds_merged_weights_and_the_adapter(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel

    loaded = load_model(
        "builtin:tiny", dtype=torch.float32, device="cpu", adapters=Lora(rank=4, alpha=8)
    )
    wanted = dict(whole_weights(train(loaded.model), sharded=False))
    capfd.readouterr()
    write_folder(loaded.model, loaded.tokenizer, tmp_path / "out")
    assert capfd.readouterr().err == ""  # no bars of transformers beside the run's own
    exported = load_model(str(tmp_path / "out"), dtype=torch.float32, device="cpu")
    named = dict(exported.model.named_parameters())
    assert named.keys() == wanted.keys() and all(torch.equal(named[n], wanted[n]) for n in wanted)
    base = AutoModelForCausalLM.from_pretrained(loaded.source, dtype=torch.float32)
    peft_merged = PeftModel.from_pretrained(
        base, str(tmp_path / "out" / "adapter")
    ).merge_and_unload()  # type: ignore[no-untyped-call]
    for name, tensor in peft_merged.named_parameters():
        torch.testing.assert_close(tensor.detach(), wanted[name], atol=1e-6, rtol=0)
