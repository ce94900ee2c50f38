"""Values are those of a plain model, one document at a time; a head comes from the weights or from
the seed, and one that can't give a value is refused by the key that names it.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from tests.models.support import FAMILIES, GROUPED, VOCAB, distance, make_batch, make_model
from trainer.base.errors import UserError
from trainer.data.batch import Batch
from trainer.models import load_value_model, pack, pad, target_values
from trainer.models.value import prepare_value_model

KEY = "critic.model.path"


def save(folder: Path, auto_class: type, **kwargs: int) -> Path:
    """``builtin:tiny`` with another kind of head, and its tokenizer."""
    loaded = load_value_model("builtin:tiny", dtype=torch.float32, device="cpu", seed=1)
    torch.manual_seed(3)
    model = auto_class.from_pretrained(loaded.source, **kwargs)  # type: ignore[attr-defined]
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def load(path: str | Path, seed: int = 1, dtype: torch.dtype = torch.float32):
    return load_value_model(str(path), dtype=dtype, device="cpu", seed=seed, key=KEY)


def value_models(family: str) -> tuple[nn.Module, nn.Module]:
    """The plain eager model and the same weights prepared for packed batches."""
    base = make_model(family, packed=False)
    config = base.config
    config.num_labels = 1
    config.classifier_dropout = 0.0
    models = []
    for _ in range(2):
        torch.manual_seed(4)
        model = AutoModelForTokenClassification.from_config(
            config, attn_implementation="eager"
        ).eval()
        model.model.load_state_dict(base.model.state_dict())  # type: ignore[union-attr]
        with torch.no_grad():
            model.score.weight.normal_()
            model.score.bias.fill_(0.25)
        models.append(model)
    return models[0], prepare_value_model(models[1])


def plain_values(model: nn.Module, batch: Batch) -> Tensor:
    """The value before each trained token: every document by itself, no packing."""
    found = []
    mask = batch.columns["loss_mask"]
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        ids = batch.columns["input_ids"][start:end]
        values = model(input_ids=ids[None], use_cache=False).logits[0, :, 0]
        found.append(values[:-1][mask[start + 1 : end]])
    return torch.cat(found)


def weighed_gradient(model: nn.Module, values: Tensor) -> Tensor:
    model.zero_grad()
    g = torch.Generator().manual_seed(7)
    (values * torch.randn(values.shape, generator=g)).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_shared_and_padded_values_equal_one_document_at_a_time(family: str) -> None:
    batch = make_batch(*GROUPED)
    plain, model = value_models(family)
    expected = plain_values(plain, batch)
    expected_gradient = weighed_gradient(plain, expected)
    scale = expected.abs().max()
    for packed in (pack(batch), pack(batch, share_prompts=True), pad(batch), pad(batch, to=60)):
        values = target_values(model, packed)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values / scale, expected / scale, atol=1e-6, rtol=0)
        assert distance(weighed_gradient(model, values), expected_gradient) < 1e-5


def test_a_batch_without_sequences_gives_no_values_but_a_gradient() -> None:
    _, model = value_models("llama")
    empty = make_batch(*GROUPED).select(torch.zeros(0, dtype=torch.int64))
    values = target_values(model, pack(empty))
    values.sum().backward()
    assert values.shape == (0,) and model.score.weight.grad is not None  # type: ignore[union-attr]


def test_a_fresh_head_is_drawn_from_the_seed_alone() -> None:
    first = load("builtin:tiny")
    torch.manual_seed(99)
    again = load("builtin:tiny", dtype=torch.bfloat16)
    other = load("builtin:tiny", seed=2)
    assert first.fresh_head
    weight = first.model.score.weight  # type: ignore[union-attr]
    torch.testing.assert_close(weight.bfloat16(), again.model.score.weight)  # type: ignore[union-attr, operator, arg-type]
    assert not torch.equal(weight, other.model.score.weight)  # type: ignore[arg-type, union-attr]
    assert not first.model.score.bias.any()  # type: ignore[union-attr, operator]
    assert 0.01 < float(weight.detach().std()) < 0.04  # type: ignore[union-attr, operator, arg-type]


def test_no_dropout_while_training() -> None:
    model = load("builtin:tiny").model
    batch = make_batch(*GROUPED, vocab=VOCAB)
    assert torch.equal(target_values(model, pack(batch)), target_values(model, pack(batch)))


@pytest.mark.parametrize(
    "auto_class", [AutoModelForTokenClassification, AutoModelForSequenceClassification]
)
def test_a_head_in_the_weights_is_used(tmp_path: Path, auto_class: type) -> None:
    """As token classification saves it, and as reward models do, which have no bias."""
    folder = save(tmp_path / "value", auto_class, num_labels=1)
    saved = auto_class.from_pretrained(folder)  # type: ignore[attr-defined]
    loaded = load(folder)
    assert not loaded.fresh_head
    assert torch.equal(loaded.model.score.weight, saved.score.weight)  # type: ignore[arg-type, union-attr]
    saved_bias = torch.zeros(1) if saved.score.bias is None else saved.score.bias
    assert torch.equal(loaded.model.score.bias, saved_bias)  # type: ignore[arg-type, union-attr]


def test_what_gives_no_value_is_refused_by_its_key(tmp_path: Path) -> None:
    several = save(tmp_path / "several", AutoModelForTokenClassification, num_labels=3)
    with pytest.raises(UserError, match=rf"{KEY}: score.* has the shape \[3.*single output"):
        load(several)
    with pytest.raises(UserError, match=f"{KEY}: there is no folder ./nowhere"):
        load("./nowhere")
