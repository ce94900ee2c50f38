"""Small models of each family, ragged batches, and the plain reference: one document at a time, the
whole softmax.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trainer.data.batch import Batch
from trainer.models import Packed, TokenStats, prepare_model, token_stats

VOCAB = 97
FAMILIES: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_model(
    family: str = "llama",
    *,
    packed: bool = True,
    seed: int = 0,
    vocab: int = VOCAB,
    pad: int | None = None,
) -> nn.Module:
    config, kind = FAMILIES[family]
    torch.manual_seed(seed)
    made = config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=family != "qwen3",
        pad_token_id=pad,
        eos_token_id=1,
        bos_token_id=None,
    )
    made._attn_implementation = "eager"
    model = kind(made).eval()
    # Larger than the usual initial weights, so that a leak between documents can't hide in small
    # numbers.
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(4)
    return prepare_model(model) if packed else model


def make_batch(
    groups: list[int],
    prompts: list[int],
    responses: list[int],
    *,
    seed: int = 1,
    vocab: int = VOCAB,
    **columns: Any,
) -> Batch:
    """Sequences whose group has one prompt of ``prompts[i]`` tokens; the response is trained."""
    g = torch.Generator().manual_seed(seed)
    prompt_of: dict[tuple[int, int], Tensor] = {}
    ids, masks = [], []
    for group, p, r in zip(groups, prompts, responses, strict=True):
        prompt = prompt_of.setdefault((group, p), torch.randint(vocab, (p,), generator=g))
        ids.append(torch.cat([prompt, torch.randint(vocab, (r,), generator=g)]))
        masks.append(torch.arange(p + r) >= p)
    rows = {"prompt_lengths": torch.tensor(prompts), "groups": torch.tensor(groups)}
    return Batch.from_sequences({"input_ids": ids, "loss_mask": masks}, rows)


GROUPED = ([0, 0, 0, 1, 2, 2, 0], [5, 5, 5, 7, 1, 1, 5], [6, 1, 9, 3, 0, 40, 6])
"""Groups apart, alone, with an empty response, with a prompt of one token."""


def reference(model: nn.Module, batch: Batch, temperature: float = 1.0) -> TokenStats:
    """Whole softmax of every document by itself through an eager transformers model."""
    log_probs, entropies = [], []
    mask = batch.columns["loss_mask"]
    for start, end in zip(
        batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
    ):
        ids = batch.columns["input_ids"][start:end]
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float() / temperature
        logp = torch.log_softmax(logits, -1)[:-1]
        entropy = -(logp.exp() * logp).sum(-1)
        wanted = mask[start + 1 : end]
        log_probs.append(logp.gather(1, ids[1:, None])[:, 0][wanted])
        entropies.append(entropy[wanted])
    return TokenStats(torch.cat(log_probs), torch.cat(entropies))


def weigh(stats: TokenStats) -> Tensor:
    """A scalar in which every log-prob and entropy has a weight of its own."""
    g = torch.Generator().manual_seed(7)
    loss = (stats.log_probs * torch.randn(stats.log_probs.shape, generator=g)).sum()
    if stats.entropy is not None:
        loss = loss + (stats.entropy * torch.randn(stats.entropy.shape, generator=g)).sum()
    return loss


def gradient(model: nn.Module, stats: TokenStats) -> Tensor:
    """Flat float32 gradient of :func:`weigh`."""
    model.zero_grad()
    weigh(stats).backward()
    return torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


def run(model: nn.Module, packed: Packed, **kwargs: Any) -> tuple[TokenStats, Tensor]:
    stats = token_stats(
        model, packed, **{"entropy": True, "temperature": 0.7, "chunk_tokens": 7, **kwargs}
    )
    return stats, gradient(model, stats)


def distance(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()
