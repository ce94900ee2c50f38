"""Freed memory goes back."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from trainer.parallel.host_memory import trim_host_memory

BLOCK, COUNT = 1 << 16, 4096


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_freed_blocks_return_to_the_system() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc, as on Debian")
    kept = [ctypes.create_string_buffer(BLOCK) for _ in range(COUNT)]
    holding = resident()
    last = kept[-1]  # at the top of the heap: what lies below can't be given back without being asked for
    del kept
    trim_host_memory()
    assert holding - resident() > BLOCK * COUNT // 2 and len(last) == BLOCK
