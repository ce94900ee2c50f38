"""Fixtures of the checkpoint tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory.

    What a kill leaves behind doesn't depend on the disk, which would cost minutes of fsync.
    """
    shared_memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="plimsoll-", dir=shared_memory))
    yield folder
    shutil.rmtree(folder)
