"""Weights in memory that another process reads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from trainer.rollout.vllm.server.shared_weights import Reader, SharedWeights, arrivals

READ = """
import json, struct, sys
data, table = open(sys.argv[1], "rb").read(), json.loads(sys.argv[2])
print([list(struct.unpack_from("<6f", data, start)) for _, kind, _, start in table if kind == "float32"])
print([row[:3] for row in table])
"""


def test_another_process_reads_what_was_written_last() -> None:
    shared = SharedWeights()
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    shared.write(arrivals(weights.items()))
    shared.write(arrivals((name, tensor + 1) for name, tensor in weights.items()))
    said = subprocess.run(
        [sys.executable, "-S", "-c", READ, shared.path, shared.table],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    ).stdout
    assert (
        said.strip()
        == "[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]\n[['a', 'float32', [2, 3]], ['b', 'bfloat16', [5]]]"
    )
    reader = Reader()
    for more in (1, 5):  # what is there now, not when it was mapped
        shared.write(arrivals((name, tensor + more) for name, tensor in weights.items()))
        found = {name: t.tolist() for name, t in reader.read(shared.path, shared.table)}
        assert found == {name: (t + more).tolist() for name, t in weights.items()}
    other = SharedWeights()
    other.write(arrivals([("c", torch.zeros(3))]))
    assert {name: t.tolist() for name, t in reader.read(other.path, other.table)} == {
        "c": [0, 0, 0]
    }
    other.close()
    shared.close()


def held() -> list[str]:
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(
            FileNotFoundError
        ):  # another thread may close any of them meanwhile
            found.append(os.readlink(fd))
    return found


def test_a_reader_can_not_change_them_and_may_outlive_the_writer() -> None:
    before = sum("memfd:weights" in link for link in held())
    shared = SharedWeights()
    shared.write(arrivals([("a", torch.zeros(4))]))
    ((_, mine),) = Reader().read(shared.path, shared.table)
    mine += 1
    assert [t.tolist() for _, t in Reader().read(shared.path, shared.table)] == [[0, 0, 0, 0]]
    shared.close()
    shared.close()
    assert mine.tolist() == [1, 1, 1, 1]
    del mine
    assert sum("memfd:weights" in link for link in held()) <= before
