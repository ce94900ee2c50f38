"""Freed memory goes back; workers inherit no weights."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest
import torch

from trainer.parallel.host_memory import MIN_OWN_MAPPING, exclude_from_forks, trim_host_memory

BLOCK, COUNT = 1 << 16, 4096


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_freed_blocks_return_to_the_system() -> None:
    if not hasattr(ctypes.CDLL(None), "malloc_trim"):
        pytest.skip("needs glibc, as on Debian")
    kept = [ctypes.create_string_buffer(BLOCK) for _ in range(COUNT)]
    holding = resident()
    last = kept[
        -1
    ]  # at the top of the heap: what lies below can't be given back without being asked for
    del kept
    trim_host_memory()
    assert holding - resident() > BLOCK * COUNT // 2 and len(last) == BLOCK


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(x, 16) for x in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


def inherited(tensor: torch.Tensor) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(int(mapped(tensor.data_ptr() + tensor.nbytes // 2)))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_a_forked_worker_has_no_weights() -> None:
    weights, other = torch.ones(MIN_OWN_MAPPING // 4), torch.ones(MIN_OWN_MAPPING // 4)
    small = torch.ones(16)  # shares its pages with whatever else the process holds
    assert inherited(weights)
    exclude_from_forks([weights[:100], small])
    assert not inherited(weights) and inherited(other) and inherited(small)
    assert float(weights.sum()) == weights.numel()
