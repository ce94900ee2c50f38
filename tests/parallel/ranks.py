"""Starts the ranks of a test as processes of their own, and never waits for them without a
bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.ranks.rendezvous import free_port, port_for

ROOT = Path(__file__).resolve().parents[2]


def start(case: dict[str, Any], folder: Path, ranks: int, *, timeout_s: float = 500.0) -> list[int]:
    """Exit codes of ``ranks`` processes of ``gradient_rank`` on ``case``; a rank past the bound is
    killed: -9.
    """
    port = free_port(port_for(str(folder)))
    deadline = time.monotonic() + timeout_s
    processes = []
    for rank in range(ranks):
        env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
        env |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        with (folder / f"rank_{rank}.log").open("w") as log:
            command = [
                sys.executable,
                "-m",
                "tests.parallel.gradient_rank",
                json.dumps(case),
                str(folder),
            ]
            processes.append(
                subprocess.Popen(
                    command, env=env, stdout=log, stderr=subprocess.STDOUT, process_group=0
                )
            )
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            codes.append(process.wait())
    return codes


def logs(folder: Path) -> str:
    """What all ranks said, for the message of a failed assertion."""
    return "\n".join(
        f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("rank_*.log"))
    )


def results(variants: Sequence[dict[str, Any]], folder: Path, ranks: int) -> list[dict[str, Any]]:
    """What each variant gave on rank 0. The ranks have to end in order."""
    codes = start({"variants": list(variants)}, folder, ranks)
    assert codes == [0] * ranks, logs(folder)
    return [torch.load(folder / f"{number}.pt") for number in range(len(variants))]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative L2 distance."""
    return float((one - other).norm() / other.norm())
