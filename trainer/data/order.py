"""The order of samples and the position in it: pure functions, so that a resumed run sees what it
would have seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Order = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far the loader has come; it counts what was delivered, never what was prefetched."""

    epoch: int = 0
    """Epochs finished."""
    offset: int = 0
    """Samples delivered of the epoch at hand."""
    samples: int = 0
    """Samples delivered in all."""


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> Order:
    """int64 [size]: the samples of an epoch in their order, from (seed, epoch) alone.

    Sorts raw 64-bit draws of PCG64, which numpy promises never to change, unlike its
    ``permutation``.
    """
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def next_batch(
    at: Position, size: int, batch_size: int, drop_last: bool
) -> tuple[Position, int, Position]:
    """Where the next batch lies and the position after it: ``(start, count, after)``.

    ``start`` equals ``at``, or the beginning of the next epoch when what is left of this one is
    less than a batch and is dropped. ``after`` stands at the next epoch's beginning when no further
    batch fits, so a run that stops at an epoch's end resumes at offset 0.
    """
    left = size - at.offset
    if left <= 0 or (drop_last and left < batch_size):
        at = Position(epoch=at.epoch + 1, samples=at.samples)
        left = size
    count = min(batch_size, left)
    offset, samples = at.offset + count, at.samples + count
    left = size - offset
    if left == 0 or (drop_last and left < batch_size):
        return at, count, Position(epoch=at.epoch + 1, samples=samples)
    return at, count, Position(epoch=at.epoch, offset=offset, samples=samples)
