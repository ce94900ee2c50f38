"""The writer reads only what is in place, and skips progress lines of failed jobs."""

from __future__ import annotations

import json
import threading

import pytest

from trainer.checkpoint.writer.progress import FillingBuffer, FillProgress, jobs, progress_line


def test_a_slice_waits_until_it_is_in_place() -> None:
    data = bytearray(100)

    def rank() -> object:
        for end in (30, 60, 100):
            data[:end] = b"x" * end
            yield progress_line(end).decode()

    buffer = FillingBuffer(memoryview(data), iter(rank()))  # type: ignore[arg-type]
    file = buffer[20:90]
    assert len(file) == 70 and not any(data)
    assert file[0:10] == b"x" * 10 and data.count(b"x") == 30
    assert file[10:40] == b"x" * 30 and data.count(b"x") == 60
    assert file[40:1000] == b"x" * 30 and data.count(b"x") == 100


def test_a_rank_that_is_gone_ends_the_writer() -> None:
    with pytest.raises(EOFError):
        FillingBuffer(memoryview(bytes(9)), iter([progress_line(4).decode()]))[0:9][0:9]


def test_progress_lines_of_a_failed_job_are_skipped() -> None:
    lines = [
        json.dumps({"folder": "a"}),
        progress_line(3).decode(),
        progress_line(9).decode(),
        json.dumps({"folder": "b"}),
    ]
    assert [job["folder"] for job in jobs(lines)] == ["a", "b"]


def test_progress_is_awaited_and_a_failure_ends_the_wait() -> None:
    progress = FillProgress()
    assert progress.wait_for_more(0, timeout_s=0.001) == 0

    def copy() -> None:
        progress.advance(5)
        progress.fail("out of memory")

    copier = threading.Thread(target=copy)
    copier.start()
    assert progress.wait_for_more(0, timeout_s=100.0) == 5
    assert progress.wait_for_more(5, timeout_s=100.0) == 5
    assert progress.failure == "out of memory"
    copier.join()
