"""Log-probs and entropies of a micro-batch's targets: one forward pass, no logits matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base.errors import UserError
from trainer.models.head import HeadRequest, TokenHead, default_chunk
from trainer.models.layout import Packed


@dataclass(frozen=True)
class TokenStats:
    """Statistics of a micro-batch's targets."""

    log_probs: Tensor
    """float32 [targets], nats."""
    entropy: Tensor | None
    """float32 [targets], nats; None when not asked for."""


def token_stats(
    model: nn.Module,
    packed: Packed,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    forward: Callable[..., Any] | None = None,
) -> TokenStats:
    """Log-probs (and entropies) [targets] of ``packed`` under softmax(logits / temperature),
    differentiable.

    ``model`` comes from :func:`trainer.models.load_model`; ``forward`` is called in its place when
    an engine wraps it. At most ``chunk_tokens`` x vocabulary logits exist at a time (default: 2**25
    logits, 2**23 on a CPU). The result is on the model's device.

    Raises :class:`UserError` when a token id is past the vocabulary.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, TokenHead):
        raise TypeError(
            "token_stats needs a model from load_model: its output projection is not a TokenHead"
        )
    vocabulary = int(model.config.vocab_size)  # type: ignore[union-attr,arg-type]
    packed = on_device(model, packed)
    chunk = chunk_tokens or default_chunk(vocabulary, packed.sources.device.type)
    request = HeadRequest(packed.sources, packed.target_ids, temperature, entropy, chunk)
    with head.answering(request):
        out = run_packed(model, packed, forward)
    return TokenStats(out[:, 0], out[:, 1] if entropy else None)


def on_device(model: nn.Module, packed: Packed) -> Packed:
    """``packed`` on the device of ``model``. Raises UserError when a token id is past the
    vocabulary.
    """
    _check_ids(packed, int(model.config.vocab_size))  # type: ignore[union-attr,arg-type]
    return packed.to(model.device)  # type: ignore[arg-type]


def run_packed(
    model: nn.Module, packed: Packed, forward: Callable[..., Any] | None = None
) -> Tensor:
    """What the head of ``model`` gives for ``packed`` (from ``on_device``); ``forward`` is called
    in place of ``model`` when an engine wraps it.
    """
    # Activations are recomputed in train() only, and generation may have left the model in eval().
    if model.training != torch.is_grad_enabled():
        model.train(torch.is_grad_enabled())
    out: Tensor = (forward or model)(
        input_ids=packed.input_ids,
        position_ids=packed.position_ids,
        # The default cache leaks across documents in train().
        use_cache=False,
        **_attention(packed),
    ).logits
    return out


def _attention(packed: Packed) -> dict[str, Any]:
    if packed.layout is None:
        return {"attention_mask": packed.attention_mask}
    # transformers passes a mask with four axes on as it is; without one it would build a mask
    # [tokens, tokens] from the resets of position_ids. The packed attention never reads it.
    return {
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=packed.input_ids.device),
        "packed_layout": packed.layout,
    }


def _check_ids(packed: Packed, vocabulary: int) -> None:
    if packed.input_ids.device.type != "cpu":
        return  # already checked on the CPU; a second check would wait for the device
    low = int(packed.input_ids.min())
    high = int(packed.input_ids.max())
    if low < 0 or high >= vocabulary:
        raise UserError(
            f"token id {low if low < 0 else high} is outside the model's vocabulary (ids 0 to "
            f"{vocabulary - 1}): the data was made with another tokenizer. Use the tokenizer of "
            "actor_rollout_ref.model.path"
        )
