"""Random numbers without state, and tokens drawn with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK = 256
"""Positions drawn at a time; a multiple of 4, the numbers that one Philox counter gives."""


def uniforms(seed: int, step: int, sample_ids: Sequence[int], start: int, count: int = BLOCK) -> Tensor:
    """float64 [samples, count], inside (0, 1): the numbers of positions ``start`` to ``start + count``.

    Each is a function of (seed, step, sample id, position) alone: Philox4x64 (Salmon et al., SC 2011) with (seed,
    sample id) as its key and (position / 4, step) as its counter. ``start`` is a multiple of 4.
    """
    out = np.empty((len(sample_ids), count))
    for row, sample in enumerate(sample_ids):
        bits = np.random.Philox(
            key=np.array([seed % 2**64, sample % 2**64], dtype=np.uint64),
            counter=np.array([start // 4, step % 2**64, 0, 0], dtype=np.uint64),
        )
        out[row] = bits.random_raw(count) >> np.uint64(32)
    # The half keeps 0 and 1 out: neither the first token of probability 0 nor one past the end can be drawn.
    return torch.from_numpy((out + 0.5) / 2.0**32)


def truncate(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """``scores`` [rows, vocabulary] (logits / temperature) with tokens outside top-k, then top-p, at -inf.

    The same sets as transformers' TopKLogitsWarper and TopPLogitsWarper: ties with the k-th stay; a token goes when it
    and all less likely ones hold at most 1 - top_p; the likeliest always stays.
    """
    if 0 < top_k < scores.shape[-1]:
        lowest = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if top_p < 1.0:
        ranked, order = scores.sort(dim=-1)
        gone = ranked.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        gone[:, -1] = False
        scores = scores.masked_fill(gone.scatter(1, order, gone), -torch.inf)
    return scores


def draw(scores: Tensor, u: Tensor) -> Tensor:
    """int64 [rows]: the token where the distribution function of softmax(``scores``) passes ``u`` [rows].

    ``scores`` float32 [rows, vocabulary]. The sum runs in float64, in float32 the last tokens of a large vocabulary
    would drown in rounding.
    """
    cdf = scores.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    threshold = u.to(cdf.device)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, threshold, right=True).squeeze(1).clamp_(max=scores.shape[-1] - 1)
