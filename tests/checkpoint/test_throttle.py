"""The writer's speed: a share of the disk's while training goes on, full speed when needed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trainer.checkpoint.writer import throttle as throttle_module
from trainer.checkpoint.writer.throttle import PIECE_BYTES, WriteThrottle

SIZE = 1000


class Clock:
    """Seconds that pass only in the waits of a throttle and where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throttle_module, "time", clock)
    monkeypatch.setattr(throttle_module, "PIECE_BYTES", 100)
    return clock


def make_throttle(clock: Clock, share: float, **limits: Any) -> WriteThrottle:
    throttle = WriteThrottle(share, **limits)
    throttle._full_speed.wait = clock.wait  # type: ignore[method-assign,assignment]
    return throttle


def write(throttle: WriteThrottle, clock: Clock, speed: float) -> float:
    """A save to a disk that takes ``speed`` bytes/s. Returns its seconds."""
    began = clock.now
    busy_until = clock.now
    released = 0
    throttle.start_save(SIZE)
    while released < SIZE:
        now = throttle.release(released, SIZE)
        busy_until = max(busy_until, clock.now) + (now - released) / speed
        released = now
    clock.now = max(clock.now, busy_until)
    throttle.finish_save()
    return clock.now - began


def test_the_first_save_shows_the_speed_and_the_next_ones_take_their_share(clock: Clock) -> None:
    throttle = make_throttle(clock, 0.25)
    assert write(throttle, clock, speed=100.0) == pytest.approx(10.0) and throttle.delay_s == 0
    # Nine pauses of a piece's time at a quarter of the speed; the last piece at the disk's own.
    assert write(throttle, clock, speed=100.0) == pytest.approx(9 * 4.0 + 1.0)
    assert throttle.delay_s == pytest.approx(27.0)
    throttle.suspend()
    assert write(throttle, clock, speed=50.0) == pytest.approx(20.0) and throttle.delay_s == 0
    throttle.resume()
    assert write(throttle, clock, speed=50.0) == pytest.approx(9 * 8.0 + 2.0)


def test_no_save_is_slowed_down_into_its_timeout(clock: Clock) -> None:
    throttle = make_throttle(clock, 0.01, max_s=20.0)
    assert write(throttle, clock, speed=100.0) == pytest.approx(10.0)
    # Not a thousand seconds.
    assert write(throttle, clock, speed=100.0) == pytest.approx(9 * 2.0 + 1.0)
    # A slow disk is not made slower.
    assert write(throttle, clock, speed=10.0) == pytest.approx(100.0)


def test_suspending_ends_a_pause() -> None:
    throttle = WriteThrottle(0.001)
    throttle._disk_speed = PIECE_BYTES / 10.0  # a pause would last hours, and so would this test
    throttle.start_save(3 * PIECE_BYTES)
    assert throttle.release(0, 3 * PIECE_BYTES) == PIECE_BYTES
    threading.Timer(0.05, throttle.suspend).start()
    assert throttle.release(PIECE_BYTES, 3 * PIECE_BYTES) == 3 * PIECE_BYTES
