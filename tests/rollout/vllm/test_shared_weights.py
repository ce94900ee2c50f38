"""Weights in memory that another process reads."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from trainer.rollout.vllm.engine.shared_weights import (
    SharedWeights,
    SharedWeightsReader,
    incoming_tensors,
)

READ = """
import json, struct, sys
data, table = open(sys.argv[1], "rb").read(), json.loads(sys.argv[2])
floats = [row for row in table if row[1] == "float32"]
print([list(struct.unpack_from("<6f", data, row[3])) for row in floats])
print([row[:3] for row in table])
"""


def test_another_process_reads_the_last_written_values() -> None:
    shared = SharedWeights()
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5, dtype=torch.bfloat16)}
    shared.write(incoming_tensors(weights.items()))
    shared.write(incoming_tensors((name, tensor + 1) for name, tensor in weights.items()))
    output = subprocess.run(
        [sys.executable, "-S", "-c", READ, shared.path, shared.table],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    ).stdout
    assert (
        output.strip()
        == "[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]\n[['a', 'float32', [2, 3]], ['b', 'bfloat16', [5]]]"
    )
    reader = SharedWeightsReader()
    for more in (1, 5):  # the values of now, not those at the mapping
        shared.write(incoming_tensors((name, tensor + more) for name, tensor in weights.items()))
        values = {name: t.tolist() for name, t in reader.read(shared.path, shared.table)}
        assert values == {name: (t + more).tolist() for name, t in weights.items()}
    other = SharedWeights()
    other.write(incoming_tensors([("c", torch.zeros(3))]))
    assert {name: t.tolist() for name, t in reader.read(other.path, other.table)} == {
        "c": [0, 0, 0]
    }
    other.close()
    shared.close()


def open_files() -> list[str]:
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        # Another thread may close any of them meanwhile.
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(fd))
    return links


def test_a_reader_can_not_change_weights_and_may_outlive_the_writer() -> None:
    before = sum("memfd:weights" in link for link in open_files())
    shared = SharedWeights()
    shared.write(incoming_tensors([("a", torch.zeros(4))]))
    ((_, tensor),) = SharedWeightsReader().read(shared.path, shared.table)
    tensor += 1
    assert [t.tolist() for _, t in SharedWeightsReader().read(shared.path, shared.table)] == [
        [0, 0, 0, 0]
    ]
    shared.close()
    shared.close()
    assert tensor.tolist() == [1, 1, 1, 1]
    del tensor
    assert sum("memfd:weights" in link for link in open_files()) <= before
