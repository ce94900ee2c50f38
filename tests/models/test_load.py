"""Loading: built-in models made once, folders, and each wrong path as one message that says what to
type.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.support import make_model
from trainer.base.errors import UserError
from trainer.models import LoadedModel, load_model, resolve

QUESTION = [{"role": "user", "content": "What is 47 + 18?"}]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def load(path: str | Path, cache: Path, dtype: torch.dtype = torch.float32, **kwargs: bool):
    return load_model(str(path), dtype=dtype, device="cpu", cache_dir=cache, **kwargs)


def test_tiny_is_small_and_made_once(cache: Path) -> None:
    first = load("builtin:tiny", cache)
    made = Path(first.source).stat().st_mtime_ns
    second = load("builtin:tiny", cache, torch.bfloat16)
    assert Path(second.source).stat().st_mtime_ns == made
    assert 1e6 <= sum(p.numel() for p in first.model.parameters()) <= 3e6
    assert second.model.get_input_embeddings().weight.dtype == torch.bfloat16  # type: ignore[operator]
    assert [f.suffix for f in cache.iterdir() if f.name.startswith(".")] == [".lock"]
    assert first.shape.vocab == len(first.tokenizer) == 512


def test_sequences_longer_than_the_model_has_positions_are_refused(cache: Path) -> None:
    loaded = load("builtin:tiny", cache)
    loaded.require_positions(8000, 192)
    wording = (
        r"^a prompt of 8000 tokens and a response of 193 exceed the 8192 tokens of "
        r".*\(max_position_embeddings\); lower data\.max_prompt_length or "
        r"data\.max_response_length$"
    )
    with pytest.raises(UserError, match=wording):
        loaded.require_positions(8000, 193)


def test_tiny_tokenizer_splits_digits_and_keeps_text(cache: Path) -> None:
    tokenizer = load("builtin:tiny", cache).tokenizer
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    digits = [t for t in tokenizer.tokenize("What is 47 + 18?") if t.strip("Ġ").isdigit()]
    assert digits == ["4", "7", "1", "8"]
    for text in ("What is 47 + 18?", "née 東京 #### 65\n", "x = 3.14; y"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert chat == "<|user|>What is 47 + 18?<|end|><|assistant|>"
    assert len(tokenizer(chat)["input_ids"]) == 13


def test_a_saved_model_is_an_ordinary_folder(cache: Path, tmp_path: Path) -> None:
    loaded = load("builtin:tiny", cache)
    loaded.model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded.tokenizer.save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.config._attn_implementation == "sdpa"
    ids = torch.arange(5, 25)[None]
    loaded.model.eval()
    torch.testing.assert_close(plain(ids).logits, loaded.model(ids).logits)
    assert load(tmp_path, cache).source == str(tmp_path)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="PLIMSOLL_CACHE"):
        load("builtin:tiny", tmp_path / "file" / "cache")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("builtin:tinny", "did you mean 'tiny'"),
        ("builtin:gpt", "There are builtin:tiny and builtin:smollm2"),
        ("./nowhere", "there is no folder ./nowhere"),
        ("/no/such/folder", "there is no folder /no/such/folder"),
        ("folder-without-a-name", "hub id such as Qwen/Qwen2.5-0.5B-Instruct"),
    ],
)
def test_wrong_paths(path: str, message: str, cache: Path) -> None:
    with pytest.raises(UserError, match=message) as e:
        resolve(path, cache)
    assert "actor_rollout_ref.model.path" in str(e.value)


def test_a_hub_id_that_cannot_be_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="cannot read the model config of nobody/nothing"):
        load("nobody/nothing", cache)


def test_wrong_folders(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load(tmp_path, cache)
    good = Path(load("builtin:tiny", cache).source)
    for f in good.iterdir():
        if f.suffix != ".safetensors":
            (tmp_path / f.name).write_bytes(f.read_bytes())
    with pytest.raises(
        UserError, match=r"no weights \(\*.safetensors\); it holds chat_template.jinja, config.json"
    ):
        load(tmp_path, cache)
    (tmp_path / "model.safetensors").write_bytes((good / "model.safetensors").read_bytes())
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"llama"', '"gpt2"'))
    with pytest.raises(UserError, match="family 'gpt2'; supported are llama, qwen2, qwen3"):
        load(tmp_path, cache)
    (tmp_path / "config.json").write_text(config.replace('"vocab_size": 512', '"vocab_size": 500'))
    with pytest.raises(UserError, match="512 tokens, more than the model's vocabulary of 500"):
        load(tmp_path, cache)
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer"):
        load(tmp_path, cache)
    with pytest.raises(UserError, match="is a file"):
        resolve(str(tmp_path / "config.json"), cache)


def test_weights_that_miss_a_layer_are_refused(cache: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    good = Path(load("builtin:tiny", cache).source)
    for f in good.iterdir():
        (tmp_path / f.name).write_bytes(f.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack model.layers.0.mlp.up_proj.weight"):
        load(tmp_path, cache)


def test_smollm2_finds_the_right_answer_likelier(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Log-probs, not text: greedy text in bfloat16 depends on the processor's kernels, which move
    these sums by 0.3 nats.
    """
    pytest.importorskip("gguf", reason="the demo extra is not installed")
    loaded = load_model("builtin:smollm2", dtype=torch.bfloat16, device="cpu")
    loaded.model.eval()
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 7 + 5?"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    right, wrong, noise = (
        answer_log_prob(loaded, prompt, text)
        for text in ("7 + 5 = 12", "7 + 5 = 31", "xq zv blorp")
    )
    assert right == pytest.approx(-2.95, abs=1.0)
    assert right - wrong > 10 and wrong - noise > 30
    assert loaded.shape.kv_heads == 3


def answer_log_prob(loaded: LoadedModel, prompt: list[int], text: str) -> float:
    """The log-prob of ``text`` as the answer to ``prompt``, nats."""
    answer = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        logits = loaded.model(torch.tensor([prompt + answer]), use_cache=False).logits[0]
    log_probs = logits.float().log_softmax(-1)[len(prompt) - 1 : -1]
    return float(log_probs.gather(1, torch.tensor(answer)[:, None]).sum())


def test_head_that_is_not_prepared_is_named() -> None:
    from tests.models.support import make_batch
    from trainer.models import pack, token_stats

    with pytest.raises(TypeError, match="load_model"):
        token_stats(make_model(packed=False), pack(make_batch([0], [2], [2])))
