"""Files are written past the page cache where that is possible, and are the same where it is
not.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from trainer.checkpoint.store import disk
from trainer.checkpoint.store.disk import BLOCK, Disk

CHUNK = 4 * BLOCK


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[memoryview]:
    monkeypatch.setattr(disk, "CHUNK", CHUNK)
    monkeypatch.setattr(disk, "DIRECT", CHUNK)
    monkeypatch.setattr(disk, "PIECE", BLOCK + 77)
    monkeypatch.setattr(disk, "CHECKED", 2 * CHUNK)
    monkeypatch.setattr(disk, "FLUSH_EVERY", CHUNK)
    with mmap.mmap(-1, 8 * CHUNK) as area:
        area[:] = os.urandom(len(area))
        view = memoryview(area)
        yield view
        view.release()


@pytest.mark.parametrize("start", [0, BLOCK, 1])
@pytest.mark.parametrize(
    "length", [1, CHUNK - 1, CHUNK, 3 * CHUNK, 3 * CHUNK + BLOCK, 4 * CHUNK + 77]
)
@pytest.mark.parametrize("refused", [False, True])
def test_any_length_at_any_address(
    memory: memoryview,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: int,
    length: int,
    refused: bool,
) -> None:
    system_open = os.open

    def without_direct(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return system_open(path, flags, mode)

    if refused:
        monkeypatch.setattr(os, "open", without_direct)
    data = memory[start : start + length]
    digests = Disk().write(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data
    assert digests == [
        xxh3_128_hexdigest(data[i : i + 2 * CHUNK]) for i in range(0, length, 2 * CHUNK)
    ]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    data.release()


def test_an_error_of_the_disk_is_no_reason_to_try_another_way(memory: memoryview) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        Disk().write(Path("/dev/full"), memory)
