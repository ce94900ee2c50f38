"""Buckets: only sequences of like length share a micro-batch (A7)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from trainer.batching.cost import Ints
from trainer.batching.inputs import check_boundaries


def assign_buckets(lengths: ArrayLike, boundaries: ArrayLike) -> Ints:
    """Bucket of each sequence, int64 [sequences].

    Bucket i holds the lengths in ``(boundaries[i-1], boundaries[i]]``; the last one is open. Raises
    UserError unless boundaries rise.
    """
    return np.searchsorted(check_boundaries(boundaries), np.asarray(lengths), side="left").astype(
        np.int64
    )


def bucket_names(boundaries: ArrayLike) -> list[str]:
    """One name per bucket, such as ``1-64``, ``65-256``, ``257+``, for metrics and pictures.

    Raises UserError unless boundaries rise.
    """
    edges = [0, *check_boundaries(boundaries).tolist()]
    return [f"{a + 1}-{b}" for a, b in pairwise(edges)] + [f"{edges[-1] + 1}+"]


def bucket_speeds(
    buckets: ArrayLike, tokens: ArrayLike, seconds: ArrayLike, count: int
) -> list[float]:
    """Tokens per second of each of ``count`` buckets; nan for a bucket without micro-batches.

    ``buckets``, ``tokens`` and ``seconds`` are those of measured micro-batches [micro-batches].
    """
    bucket = np.asarray(buckets, np.int64)
    total = np.bincount(bucket, np.asarray(tokens, np.float64), minlength=count)
    spent = np.bincount(bucket, np.asarray(seconds, np.float64), minlength=count)
    return [float(t / s) if s > 0 else float("nan") for t, s in zip(total, spent, strict=True)]
