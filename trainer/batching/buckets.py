"""Buckets: sequences of like length travel together (A7)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from trainer.batching.cost import Ints
from trainer.batching.inputs import check_boundaries


def assign_buckets(lengths: ArrayLike, boundaries: ArrayLike) -> Ints:
    """int64 [sequences]: bucket i holds the lengths in ``(boundaries[i-1], boundaries[i]]``; the
    last one is open.
    """
    return np.searchsorted(check_boundaries(boundaries), np.asarray(lengths), side="left").astype(
        np.int64
    )


def bucket_names(boundaries: ArrayLike) -> list[str]:
    """One name per bucket, such as ``1-64``, ``65-256``, ``257+``, for metrics and pictures."""
    edges = [0, *check_boundaries(boundaries).tolist()]
    return [f"{a + 1}-{b}" for a, b in pairwise(edges)] + [f"{edges[-1] + 1}+"]


def bucket_speeds(
    buckets: ArrayLike, tokens: ArrayLike, seconds: ArrayLike, count: int
) -> list[float]:
    """Tokens per second of each of ``count`` buckets over measured micro-batches; nan for a bucket
    without any.

    ``buckets``, ``tokens``, ``seconds``: one entry per micro-batch.
    """
    which = np.asarray(buckets, np.int64)
    total = np.bincount(which, np.asarray(tokens, np.float64), minlength=count)
    spent = np.bincount(which, np.asarray(seconds, np.float64), minlength=count)
    return [float(t / s) if s > 0 else float("nan") for t, s in zip(total, spent, strict=True)]
