"""The writer reads nothing that is not in place yet, and what failed jobs leave in the pipe is
skipped.
"""

from __future__ import annotations

import json
import threading

import pytest

from trainer.checkpoint.writer.progress import Arriving, Filled, jobs, line_of


def test_a_slice_waits_until_it_is_in_place() -> None:
    data = bytearray(100)

    def rank() -> object:
        for end in (30, 60, 100):
            data[:end] = b"x" * end
            yield line_of(end).decode()

    whole = Arriving(memoryview(data), iter(rank()))  # type: ignore[arg-type]
    file = whole[20:90]
    assert len(file) == 70 and not any(data)
    assert file[0:10] == b"x" * 10 and data.count(b"x") == 30
    assert file[10:40] == b"x" * 30 and data.count(b"x") == 60
    assert file[40:1000] == b"x" * 30 and data.count(b"x") == 100


def test_a_rank_that_is_gone_ends_the_writer() -> None:
    with pytest.raises(EOFError):
        Arriving(memoryview(bytes(9)), iter([line_of(4).decode()]))[0:9][0:9]


def test_what_a_failed_job_left_is_skipped() -> None:
    lines = [
        json.dumps({"folder": "a"}),
        line_of(3).decode(),
        line_of(9).decode(),
        json.dumps({"folder": "b"}),
    ]
    assert [job["folder"] for job in jobs(lines)] == ["a", "b"]


def test_progress_is_awaited_and_a_failure_ends_the_wait() -> None:
    filled = Filled()
    assert filled.beyond(0, timeout_s=0.001) == 0
    copier = threading.Thread(target=lambda: [filled.advance(5), filled.fail()])
    copier.start()
    assert filled.beyond(0, timeout_s=100.0) == 5
    assert filled.beyond(5, timeout_s=100.0) == 5 and filled.failed
    copier.join()
