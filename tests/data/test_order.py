from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainer.data.order import Position, epoch_order, next_batch


def test_order_never_changes_between_versions() -> None:
    """A checkpoint of today resumes tomorrow: the order is written down here."""
    assert epoch_order(8, 1, 0, True).tolist() == ORDER_1_0
    assert epoch_order(8, 1, 1, True).tolist() != ORDER_1_0
    assert epoch_order(8, 2, 0, True).tolist() != ORDER_1_0
    assert epoch_order(4, 1, 5, False).tolist() == [0, 1, 2, 3]


ORDER_1_0 = [2, 4, 7, 5, 0, 6, 3, 1]


@given(st.integers(1, 300), st.integers(0, 2**31), st.integers(0, 5))
def test_an_epoch_holds_every_sample_once(size: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_order(size, seed, epoch, True)), np.arange(size))


@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.integers(1, 30))
def test_positions_go_through_every_epoch(
    size: int, batch: int, drop_last: bool, steps: int
) -> None:
    if drop_last and batch > size:
        return
    at = Position()
    delivered = 0
    per_epoch: dict[int, int] = {}
    for _ in range(steps):
        start, count, after = next_batch(at, size, batch, drop_last)
        assert start == at  # a position at an epoch's end is written as the beginning of the next
        assert 0 < count <= batch and start.offset + count <= size
        assert not drop_last or count == batch
        delivered += count
        assert after.samples == delivered
        assert after.offset < size
        per_epoch[start.epoch] = start.offset + count
        at = after
    for epoch, seen in per_epoch.items():
        if epoch < at.epoch:
            assert seen == (size // batch * batch if drop_last else size)


def test_a_remainder_too_short_for_a_larger_batch_is_dropped() -> None:
    start, count, after = next_batch(Position(epoch=2, offset=6, samples=26), 10, 8, True)
    assert (start, count) == (Position(epoch=3, samples=26), 8)
    assert after == Position(epoch=4, samples=34)
