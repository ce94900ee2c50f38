from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkpoint.zygote import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    process = Zygote()
    yield process
    process.close()
