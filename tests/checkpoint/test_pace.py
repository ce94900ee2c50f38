"""The writer's pace: a share of the disk's speed beside training, all of it as soon as somebody
waits.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.store.disk import digest_of
from trainer.checkpoint.writer import pace as module
from trainer.checkpoint.writer.client import WriterClient
from trainer.checkpoint.writer.pace import Pace
from trainer.checkpoint.writer.progress import Filled

SIZE = 1000


class Clock:
    """Seconds that pass only in the waits of :class:`Pace` and where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(module, "STEP", 100)
    return made


def write(pace: Pace, clock: Clock, speed: float) -> float:
    """A save that a disk of ``speed`` bytes/s takes; its seconds."""
    began, known = clock.now, 0
    pace.begin(SIZE)
    busy_until = clock.now
    while known < SIZE:
        now = pace.next(known, SIZE)
        busy_until = max(busy_until, clock.now) + (now - known) / speed
        known = now
    clock.now = max(clock.now, busy_until)
    pace.end()
    return clock.now - began


def test_the_first_save_shows_the_speed_and_the_next_ones_take_their_share(clock: Clock) -> None:
    pace = Pace(0.25)
    pace._hurry.wait = clock.wait  # type: ignore[method-assign,assignment]
    assert write(pace, clock, speed=100.0) == pytest.approx(10.0) and pace.extra_s == 0
    # Nine pauses of a piece's time at a quarter of the speed; the last piece at the disk's own.
    assert write(pace, clock, speed=100.0) == pytest.approx(9 * 4.0 + 1.0)
    assert pace.extra_s == pytest.approx(27.0)
    pace.hurry()
    assert write(pace, clock, speed=50.0) == pytest.approx(20.0) and pace.extra_s == 0
    pace.ease()
    assert write(pace, clock, speed=50.0) == pytest.approx(9 * 8.0 + 2.0)


def test_no_save_is_slowed_down_into_its_time_out(clock: Clock) -> None:
    pace = Pace(0.01, longest_s=20.0)
    pace._hurry.wait = clock.wait  # type: ignore[method-assign,assignment]
    assert write(pace, clock, speed=100.0) == pytest.approx(10.0)
    assert write(pace, clock, speed=100.0) == pytest.approx(9 * 2.0 + 1.0)  # not a thousand seconds
    assert write(pace, clock, speed=10.0) == pytest.approx(100.0)  # a slow disk is not made slower


def test_whoever_waits_does_not_wait_for_a_pause() -> None:
    pace = Pace(0.001)
    pace._speed = module.STEP / 10.0  # a pause would last hours, and so would this test
    pace.begin(3 * module.STEP)
    assert pace.next(0, 3 * module.STEP) == module.STEP
    threading.Timer(0.05, pace.hurry).start()
    assert pace.next(module.STEP, 3 * module.STEP) == 3 * module.STEP


def test_a_slow_save_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP", 1 << 20)
    size = (5 << 20) + 17
    fd = os.memfd_create("snapshot")
    data = os.urandom(size)
    os.write(fd, data)
    client, pace, filled = (
        WriterClient([fd], "trainer.checkpoint.store.disk:Disk"),
        Pace(0.5),
        Filled(),
    )
    pace._speed = 50e6
    filled.advance(size)
    (tmp_path / "step").mkdir()
    try:
        client.write(
            tmp_path / "step",
            [FileSpec("a", 0, size)],
            buffer=0,
            size=size,
            timeout_s=250,
            filled=filled,
            pace=pace,
        )
    finally:
        client.stop()
        os.close(fd)
    assert (tmp_path / "step" / "a").read_bytes() == data
    assert digest_of(tmp_path / "step" / "a") and pace._slowed


def test_a_process_with_more_than_a_thousand_open_files_saves_too(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip(f"this machine lets a process open {hard} files")
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (2000 if hard == resource.RLIM_INFINITY else min(hard, 4096), hard)
    )
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        fd = os.memfd_create("snapshot")
        os.write(fd, b"x" * 10)
        client, filled = WriterClient([fd], "trainer.checkpoint.store.disk:Disk"), Filled()
        filled.advance(10)
        (tmp_path / "step").mkdir()
        try:
            client.write(
                tmp_path / "step",
                [FileSpec("a", 0, 10)],
                buffer=0,
                size=10,
                timeout_s=250,
                filled=filled,
                pace=Pace(1),
            )
        finally:
            client.stop()
            os.close(fd)
    finally:
        for number in opened:
            os.close(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert (tmp_path / "step" / "a").read_bytes() == b"x" * 10


def test_the_writer_ends_at_once_though_a_forked_process_holds_its_input_open() -> None:
    fd = os.memfd_create("snapshot")
    client = WriterClient([fd], "trainer.checkpoint.store.disk:Disk")
    client.start()
    process = client._process
    assert process is not None
    holds, release = os.pipe()
    if (child := os.fork()) == 0:
        os.close(release)
        os.read(holds, 1)  # until the parent closes its end
        os._exit(0)
    try:
        client.stop(timeout_s=250.0)
        assert process.returncode == 0  # not killed when that time was over
    finally:
        for number in (holds, release, fd):
            os.close(number)
        os.waitpid(child, 0)
