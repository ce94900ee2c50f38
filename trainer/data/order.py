"""The order of samples and the position in it.

Pure, so that a resumed run sees the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Order = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far the loader has come, in samples that were delivered (not just prefetched)."""

    epoch: int = 0
    """Epochs finished."""
    offset: int = 0
    """Samples delivered in the current epoch."""
    samples: int = 0
    """Samples delivered in all."""


class NextBatch(NamedTuple):
    """A batch and the position after it."""

    start: Position
    size: int
    """Samples of the batch."""
    after: Position


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool) -> Order:
    """The samples of an epoch in their order, int64 [size], from (seed, epoch) alone.

    It sorts raw 64-bit draws of PCG64, which numpy promises never to change, unlike its
    ``permutation``.
    """
    if not shuffle:
        return np.arange(size, dtype=np.int64)
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def next_batch(position: Position, size: int, batch_size: int, drop_last: bool) -> NextBatch:
    """The next batch from ``position`` on, in a data set of ``size`` samples.

    It starts at ``position``, or at the beginning of the next epoch when less than a batch is left
    of this one and is dropped. ``after`` is the next epoch's beginning when no further batch fits,
    so that a run that stops at an epoch's end resumes at offset 0.
    """
    remaining = size - position.offset
    if remaining <= 0 or (drop_last and remaining < batch_size):
        position = Position(epoch=position.epoch + 1, samples=position.samples)
        remaining = size
    count = min(batch_size, remaining)
    offset = position.offset + count
    samples = position.samples + count
    remaining = size - offset
    after = Position(epoch=position.epoch, offset=offset, samples=samples)
    if remaining == 0 or (drop_last and remaining < batch_size):
        after = Position(epoch=position.epoch + 1, samples=samples)
    return NextBatch(position, count, after)
