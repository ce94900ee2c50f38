"""The writer process and its client."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.store.file_writing import file_digest
from trainer.checkpoint.writer import throttle as throttle_module
from trainer.checkpoint.writer.client import WriterClient
from trainer.checkpoint.writer.progress import FillProgress
from trainer.checkpoint.writer.throttle import WriteThrottle

DISK = "trainer.checkpoint.store.disk:Disk"


def write_one_file(data: bytes, folder: Path, throttle: WriteThrottle) -> dict[str, list[object]]:
    """Write ``data`` from a host buffer into ``folder / "a"``. Returns the client's records."""
    fd = os.memfd_create("snapshot")
    os.write(fd, data)
    client = WriterClient([fd], DISK)
    progress = FillProgress()
    progress.advance(len(data))
    folder.mkdir()
    try:
        return client.write(
            folder,
            [FileSpec("a", 0, len(data))],
            buffer=0,
            size=len(data),
            timeout_s=250,
            progress=progress,
            throttle=throttle,
        )
    finally:
        client.stop()
        os.close(fd)


def test_a_throttled_save_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle_module, "PIECE_BYTES", 1 << 20)
    data = os.urandom((5 << 20) + 17)
    throttle = WriteThrottle(0.5)
    throttle._disk_speed = 50e6
    records = write_one_file(data, tmp_path / "step", throttle)
    assert (tmp_path / "step" / "a").read_bytes() == data
    assert records == {"a": [len(data), [file_digest(tmp_path / "step" / "a")]]}
    assert throttle._was_slowed


@contextmanager
def many_open_files(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip(f"this machine lets a process open {hard} files")
    limit = 2000 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    try:
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_process_with_more_than_a_thousand_open_files_saves_too(tmp_path: Path) -> None:
    with many_open_files(1100):
        write_one_file(b"x" * 10, tmp_path / "step", WriteThrottle(1))
    assert (tmp_path / "step" / "a").read_bytes() == b"x" * 10


def test_the_writer_ends_at_once_though_a_forked_process_holds_its_input_open() -> None:
    fd = os.memfd_create("snapshot")
    client = WriterClient([fd], DISK)
    client.start()
    process = client._process
    assert process is not None
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write_end)
        os.read(read_end, 1)  # until the parent closes its end
        os._exit(0)
    try:
        client.stop(timeout_s=250.0)
        assert process.returncode == 0  # not killed when that time was over
    finally:
        for number in (read_end, write_end, fd):
            os.close(number)
        os.waitpid(child, 0)
