"""How token losses become the loss of an optimizer step: weights made before the batch is split.

With weights from the counts of the *whole* step, its loss is the plain sum over all micro-batches
and ranks of (weight * token loss). A mean taken per micro-batch would instead change with the way
the batch was cut.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from trainer.algorithms.ragged import segment_count

LossAggMode = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
]


def token_weights(
    mode: LossAggMode,
    mask: Tensor,
    sequence: Tensor,
    sequences: int,
    *,
    max_response_length: int | None = None,
    global_tokens: int | None = None,
    global_sequences: int | None = None,
) -> Tensor:
    """Weight of each token's loss in the loss of an optimizer step: float32 [tokens], 0 where
    ``mask`` is False.

    ``mask`` bool [tokens]: trained tokens; ``sequence`` int64 [tokens] below ``sequences``. With T
    trained tokens, S sequences that have any, and |s| those of sequence s, a token of s weighs

    ======================== =================
    token-mean               1 / T
    seq-mean-token-mean      1 / (S * |s|)
    seq-mean-token-sum       1 / S
    seq-mean-token-sum-norm  1 / (S * L)
    ======================== =================

    where L is ``max_response_length``, a constant of the run (Dr.GRPO, arXiv 2503.20783, section
    3.2). A sequence without trained tokens counts nowhere. Pass whole sequences: |s| is counted
    here. ``global_tokens`` and ``global_sequences`` are T and S where the caller holds only a part
    of the step's batch; else they are counted too.

    Raises ValueError for an unknown ``mode`` and a norm mode without a positive
    ``max_response_length``.
    """
    if mode not in get_args(LossAggMode):
        raise ValueError(f"loss_agg_mode {mode!r} is none of {', '.join(get_args(LossAggMode))}")
    mask = mask.bool()
    counts = segment_count(sequence[mask], sequences)
    tokens = int(counts.sum()) if global_tokens is None else global_tokens
    trained = int((counts > 0).sum()) if global_sequences is None else global_sequences
    weights = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    if tokens == 0 or trained == 0:
        return weights
    if mode == "token-mean":
        weights[mask] = 1.0 / tokens
    elif mode == "seq-mean-token-mean":
        weights[mask] = (1.0 / (trained * counts.double()))[sequence[mask]].float()
    elif mode == "seq-mean-token-sum":
        weights[mask] = 1.0 / trained
    else:
        if max_response_length is None or max_response_length < 1:
            raise ValueError("seq-mean-token-sum-norm needs max_response_length, at least 1 token")
        weights[mask] = 1.0 / (trained * max_response_length)
    return weights


def aggregate(losses: Tensor, weights: Tensor) -> Tensor:
    """A micro-batch's share of the step's loss: float32 scalar from ``losses`` and ``weights``
    [targets].

    A filler (no targets) gives an exact 0 that still reaches backward. A token of weight 0 adds
    nothing, even when its loss is not finite.
    """
    return torch.where(weights != 0, losses.float() * weights, 0.0).sum()
