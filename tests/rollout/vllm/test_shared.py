"""Weights in memory that another process reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from trainer.rollout.vllm.shared import SharedWeights, read_shared

READ = """
import json, struct, sys
data, table = open(sys.argv[1], "rb").read(), json.loads(sys.argv[2])
print([list(struct.unpack_from("<6f", data, start)) for _, kind, _, start in table if kind == "float32"])
print([row[:3] for row in table])
"""


def test_another_process_reads_what_was_written_last() -> None:
    shared = SharedWeights()
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    shared.write(weights.items())
    shared.write((name, tensor + 1) for name, tensor in weights.items())
    said = subprocess.run(
        [sys.executable, "-S", "-c", READ, shared.path, shared.table],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert said.strip() == "[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]\n[['a', 'float32', [2, 3]], ['b', 'bfloat16', [5]]]"
    with read_shared(shared.path, shared.table) as found:
        assert {name: t.tolist() for name, t in found} == {n: (t + 1).tolist() for n, t in weights.items()}
    shared.close()


def test_a_reader_can_not_change_them_and_may_outlive_the_writer() -> None:
    shared = SharedWeights()
    shared.write([("a", torch.zeros(4))])
    with read_shared(shared.path, shared.table) as found:
        ((_, mine),) = found
    mine += 1
    with read_shared(shared.path, shared.table) as found:
        assert [t.tolist() for _, t in found] == [[0, 0, 0, 0]]
    shared.close()
    shared.close()
    assert mine.tolist() == [1, 1, 1, 1]
    del mine, found
    held = [os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    assert not any("memfd:weights" in link for link in held)
