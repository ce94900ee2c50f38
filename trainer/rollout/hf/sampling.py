"""Random numbers without state, and tokens drawn with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.rollout.settings import Sampling

WIDTH = 128
"""Tokens of a block of the distribution function."""
CHOICE_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Scores of one drawing pass by kind of device: what a cache holds, 256 MiB."""


def uniforms(seed: int, step: int, sample_ids: Sequence[int], start: int, count: int) -> Tensor:
    """float64 [samples, count], inside (0, 1): the numbers of positions ``start`` to ``start +
    count``.

    Each is a function of (seed, step, sample id, position) alone: Philox4x64 (Salmon et al., SC
    2011) with (seed, sample id) as its key and (position / 4, step) as its counter. ``start`` is a
    multiple of 4.
    """
    out = np.empty((len(sample_ids), count))
    for row, sample in enumerate(sample_ids):
        bits = np.random.Philox(
            key=np.array([seed % 2**64, sample % 2**64], dtype=np.uint64),
            counter=np.array([start // 4, step % 2**64, 0, 0], dtype=np.uint64),
        )
        out[row] = bits.random_raw(count) >> np.uint64(32)
    # The half keeps 0 and 1 out: neither the first token of probability 0 nor one past the end can
    # be drawn.
    return torch.from_numpy((out + 0.5) / 2.0**32)


def truncate(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """``scores`` [rows, vocabulary] (logits / temperature) with tokens outside top-k, then top-p,
    at -inf.

    The same sets as transformers' TopKLogitsWarper and TopPLogitsWarper: ties with the k-th stay; a
    token goes when it and all less likely ones hold at most 1 - top_p; the likeliest always stays.
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


def draw(scores: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The token int64 [rows] where the distribution function of softmax(``scores``) passes ``u``
    float64 [rows], and log sum exp ``scores`` float32 [rows].

    ``scores`` float32 [rows, vocabulary]. First the block of tokens, then the token inside it: sums
    over blocks run in float64, for in float32 the last tokens of a large vocabulary would drown in
    rounding.
    """
    rows, vocabulary = scores.shape
    blocks = -(-vocabulary // WIDTH)
    mass = (
        scores.new_zeros(rows, blocks * WIDTH) if vocabulary % WIDTH else torch.empty_like(scores)
    )
    top = scores.amax(dim=-1, keepdim=True)
    torch.sub(scores, top, out=mass[:, :vocabulary])
    mass[:, :vocabulary].exp_()
    mass = mass.view(rows, blocks, WIDTH)
    cdf = mass.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    wanted = u[:, None] * cdf[:, -1:]
    block = torch.searchsorted(cdf, wanted, right=True).clamp_(max=blocks - 1)
    inside = mass.gather(1, block[..., None].expand(-1, -1, WIDTH))[:, 0].cumsum(
        dim=-1, dtype=torch.float64
    )
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_(min=0)), 0.0)
    # The sum of a block was rounded: what is wanted must lie before its end, where a token of
    # probability 0 may stand.
    wanted = torch.minimum((wanted - before).clamp_(min=0.0), inside[:, -1:] * (1 - 2.0**-52))
    token = block * WIDTH + torch.searchsorted(inside, wanted, right=True).clamp_(max=WIDTH - 1)
    return token.squeeze(1).clamp_(max=vocabulary - 1), top.squeeze(1) + cdf[:, -1].log().float()


def choose(logits: Tensor, u: Tensor | None, how: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens int64 [rows] and their log-probs float32 [rows] under softmax(``logits`` /
    temperature), untruncated.

    ``logits`` [rows, vocabulary] is overwritten. ``u`` float64 [rows], None when greedy.
    """
    size = max(1, CHOICE_ELEMENTS[logits.device.type] // logits.shape[-1])
    if len(logits) > size:
        parts = [
            choose(logits[i : i + size], u if u is None else u[i : i + size], how)
            for i in range(0, len(logits), size)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    scores = logits.float()
    if how.scale != 1.0:
        scores.div_(how.scale)
    if u is None:
        token, norm = scores.argmax(dim=-1), scores.logsumexp(dim=-1)
    elif how.top_k > 0 or how.top_p < 1.0:
        token, norm = draw(truncate(scores, how.top_k, how.top_p), u)[0], scores.logsumexp(dim=-1)
    else:
        token, norm = draw(scores, u)
    return token, scores.gather(1, token[:, None]).squeeze(1) - norm
