"""Small writes wait for room on a full disk; what can't pass is raised at once."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.base import full_disk, rank_records, signals
from trainer.base.metrics_file import MetricsFile, by_step


class Clock:
    """Time that passes only while a write waits."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(full_disk, "time", clock)
    return clock


def full_until(
    clock: Clock, until: float, number: int, part: int = 0
) -> Callable[[int, bytes], int]:
    """``os.write`` on a disk that is full until ``until``, after it took ``part`` bytes."""
    write = os.write
    room = part

    def call(fd: int, data: bytes) -> int:
        nonlocal room
        if clock.now >= until:
            return write(fd, data)
        if room == 0:
            raise OSError(number, os.strerror(number))
        taken = data[:room]
        room = 0
        return write(fd, taken)

    return call


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_line_waits_for_room_and_is_whole(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    record = MetricsFile(tmp_path / "metrics.jsonl", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_until(clock, 6.0, number, part=7))
        record.append({"step": 1, "loss": 0.5})
    record.append({"step": 2})
    assert by_step(tmp_path / "metrics.jsonl") == {1: {"step": 1, "loss": 0.5}, 2: {"step": 2}}
    said = capsys.readouterr().err
    assert said.count(os.strerror(number)) == 1 and "metrics.jsonl can't be written" in said
    assert "is written, after 6 s" in said


@pytest.mark.parametrize(
    ("number", "asked_to_stop", "waited_s"),
    [
        (errno.ENOSPC, None, full_disk.WAIT_S),
        (errno.ENOSPC, "USR2", full_disk.ASKED_TO_STOP_S),
        (errno.EROFS, None, 0.0),
        (errno.EBADF, None, 0.0),
    ],
)
def test_the_wait_is_bounded(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    asked_to_stop: str | None,
    waited_s: float,
) -> None:
    monkeypatch.setattr(signals, "requested", lambda: asked_to_stop)
    record = MetricsFile(tmp_path / "metrics.jsonl", 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_until(clock, 1e9, number))
        with pytest.raises(OSError, match=os.strerror(number)):
            record.append({"step": 1})
    assert clock.now == pytest.approx(waited_s, abs=1)


def test_the_end_record_and_what_is_set_aside_wait_too(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    record = MetricsFile(path, 0)
    record.append({"step": 1})
    replace = os.replace

    def full(old: Any, new: Any) -> None:
        if clock.now % 8 < 6:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(new))
        replace(old, new)

    monkeypatch.setattr(os, "replace", full)
    assert rank_records.write_end(tmp_path, 0, kind="stopped", exit_code=85, step=4)
    end = rank_records.read_end(rank_records.end_file(tmp_path, 0))
    assert end is not None and end.step == 4
    MetricsFile(path, 0, attempt=2).close()
    assert list(by_step(tmp_path / "metrics.before_attempt_2.jsonl")) == [1]
    assert by_step(path) == {}
    assert not list(tmp_path.glob(".*")), "no temporary file is left"
