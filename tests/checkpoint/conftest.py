from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory: what a kill leaves behind doesn't depend on the disk, which would cost
    minutes of fsync.
    """
    folder = Path(
        tempfile.mkdtemp(prefix="plimsoll-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    )
    yield folder
    shutil.rmtree(folder)
