"""Files are written by direct I/O where that is possible, and are equal where it is not."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from trainer.checkpoint.store import file_writing
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.file_writing import DIRECT_ALIGNMENT

CHUNK = 4 * DIRECT_ALIGNMENT


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[memoryview]:
    monkeypatch.setattr(file_writing, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(file_writing, "DIRECT_FROM_BYTES", CHUNK)
    monkeypatch.setattr(file_writing, "COPY_BYTES", DIRECT_ALIGNMENT + 77)
    monkeypatch.setattr(file_writing, "CHECKSUM_BYTES", 2 * CHUNK)
    monkeypatch.setattr(file_writing, "FLUSH_BYTES", CHUNK)
    with mmap.mmap(-1, 8 * CHUNK) as area:
        area[:] = os.urandom(len(area))
        view = memoryview(area)
        yield view
        view.release()


@pytest.mark.parametrize("start", [0, DIRECT_ALIGNMENT, 1])
@pytest.mark.parametrize(
    "length", [1, CHUNK - 1, CHUNK, 3 * CHUNK, 3 * CHUNK + DIRECT_ALIGNMENT, 4 * CHUNK + 77]
)
@pytest.mark.parametrize("without_direct_io", [False, True])
def test_any_length_at_any_address(
    memory: memoryview,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    length: int,
    without_direct_io: bool,
) -> None:
    system_open = os.open

    def open_buffered_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_open(path, flags, mode)

    if without_direct_io:
        monkeypatch.setattr(os, "open", open_buffered_only)
    data = memory[start : start + length]
    digests = Disk().write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data
    assert digests == [
        xxh3_128_hexdigest(data[i : i + 2 * CHUNK]) for i in range(0, length, 2 * CHUNK)
    ]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    data.release()


def test_a_full_disk_is_an_error_with_direct_io(memory: memoryview) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        Disk().write(Path("/dev/full"), memory)
