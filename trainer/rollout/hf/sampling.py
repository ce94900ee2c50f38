"""Counter-based random numbers, and tokens sampled with them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.rollout.settings import Sampling

BLOCK = 128
"""Tokens of a block of the distribution function."""
SAMPLING_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Scores sampled from at a time, by kind of device: 4 MiB, which a CPU's cache holds; 256 MiB."""


def uniforms(seed: int, step: int, sample_ids: Sequence[int], start: int, count: int) -> Tensor:
    """Random numbers in (0, 1) of the positions ``start`` to ``start + count``, float64 [samples,
    count].

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
    # The half excludes 0 and 1, which would select a first token of probability 0 or one past the
    # end.
    return torch.from_numpy((out + 0.5) / 2.0**32)


def truncate(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set tokens outside of top-k, then of top-p, to -inf in ``scores`` (logits / temperature)
    [rows, vocabulary].

    The same sets as transformers' TopKLogitsWarper and TopPLogitsWarper: ties with the k-th token
    stay; a token is removed when it and all less likely ones hold at most 1 - top_p; the likeliest
    always stays.
    """
    if 0 < top_k < scores.shape[-1]:
        lowest = scores.topk(top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if top_p < 1.0:
        ranked, order = scores.sort(dim=-1)
        removed = ranked.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
        removed[:, -1] = False
        scores = scores.masked_fill(removed.scatter(1, order, removed), -torch.inf)
    return scores


def invert_cdf(scores: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inversion: the token int64 [rows] at which the distribution function of
    softmax(``scores``) exceeds ``u`` float64 [rows], and logsumexp of ``scores`` float32 [rows].

    ``scores`` float32 [rows, vocabulary]. It finds the block of tokens first, then the token in it.
    Sums over blocks are in float64: in float32 the last tokens of a large vocabulary would be lost
    to rounding.
    """
    rows, vocabulary = scores.shape
    blocks = -(-vocabulary // BLOCK)
    mass = (
        scores.new_zeros(rows, blocks * BLOCK) if vocabulary % BLOCK else torch.empty_like(scores)
    )
    top = scores.amax(dim=-1, keepdim=True)
    torch.sub(scores, top, out=mass[:, :vocabulary])
    mass[:, :vocabulary].exp_()
    mass = mass.view(rows, blocks, BLOCK)
    cdf = mass.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = u[:, None] * cdf[:, -1:]
    block = torch.searchsorted(cdf, target, right=True).clamp_(max=blocks - 1)
    inside = mass.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0].cumsum(
        dim=-1, dtype=torch.float64
    )
    before = torch.where(block > 0, cdf.gather(1, (block - 1).clamp_(min=0)), 0.0)
    # The sum of a block was rounded: the target must lie before the end of the block, where a token
    # of probability 0 may be.
    target = torch.minimum((target - before).clamp_(min=0.0), inside[:, -1:] * (1 - 2.0**-52))
    token = block * BLOCK + torch.searchsorted(inside, target, right=True).clamp_(max=BLOCK - 1)
    return token.squeeze(1).clamp_(max=vocabulary - 1), top.squeeze(1) + cdf[:, -1].log().float()


def sample_tokens(logits: Tensor, u: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Sample tokens int64 [rows], and their log-probs float32 [rows] under softmax(``logits`` /
    temperature) without top-k and top-p.

    ``logits`` [rows, vocabulary] is overwritten. ``u``: random numbers float64 [rows], None when
    the sampling is greedy.
    """
    size = max(1, SAMPLING_ELEMENTS[logits.device.type] // logits.shape[-1])
    if len(logits) > size:
        parts = []
        for start in range(0, len(logits), size):
            rows = slice(start, start + size)
            parts.append(sample_tokens(logits[rows], None if u is None else u[rows], sampling))
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])
    scores = logits.float()
    if sampling.scale != 1.0:
        scores.div_(sampling.scale)
    if u is None:
        token = scores.argmax(dim=-1)
        norm = scores.logsumexp(dim=-1)
    elif sampling.top_k > 0 or sampling.top_p < 1.0:
        token, _ = invert_cdf(truncate(scores, sampling.top_k, sampling.top_p), u)
        norm = scores.logsumexp(dim=-1)
    else:
        token, norm = invert_cdf(scores, u)
    return token, scores.gather(1, token[:, None]).squeeze(1) - norm
