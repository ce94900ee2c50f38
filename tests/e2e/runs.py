"""Whole runs through the command line, small ones: start, stop, kill, and read what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.e2e import held_worker
from trainer.base.metrics_file import TIMING_PREFIXES

ROOT = Path(__file__).resolve().parents[2]
BOUND_S = 280.0
SMALL = [
    "trainer.logger=[console]",
    "trainer.device=cpu",
    "trainer.enable_monitor=false",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.export_hf=true",
    "data.num_workers=1",
    "data.val_max_samples=4",
]
SFT = [
    "experiment=demo_sft",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    *SMALL,
]
GRPO = [
    "experiment=demo_grpo",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "data.max_response_length=8",
    *SMALL,
]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainer", *arguments]


def start(run: Path, *arguments: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(*arguments, f"trainer.default_local_dir={run}"),
        cwd=ROOT,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(ROOT)}
        | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and screen; a run past the bound is killed and fails the test."""
    try:
        screen = process.communicate(timeout=BOUND_S)[0]
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(
            f"the run went on for more than {BOUND_S} s: {process.communicate()[0]}"
        ) from None
    return process.returncode, screen


def kill(process: subprocess.Popen[str]) -> None:
    """KILL the command and what is in its process group; ranks of several end by themselves when it
    is gone.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def finish(run: Path, *arguments: str, code: int = 0, **env: str) -> str:
    found, screen = end(start(run, *arguments, **env))
    assert found == code, screen
    return screen


def start_held(run: Path, step: int, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """A run that doesn't go on from ``step`` before it is asked to stop or ``go`` lies in its
    folder.
    """
    held = {"PLIMSOLL_WORKER_MODULE": held_worker.__name__, held_worker.HELD_AT: str(step)}
    return start(run, *arguments, **held, **env)


def interrupt(
    run: Path, number: int, *arguments: str, step: int, before: int, **env: str
) -> tuple[int, str]:
    """Start a run, send it a signal once it has recorded ``step``, at any time ``before`` that one,
    and wait for its end.
    """
    process = start_held(run, before - 1, *arguments, **env)
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline and process.poll() is None:
        if any(row["training/global_step"] >= step for row in rows(run)):
            break
        time.sleep(0.02)
    if number == signal.SIGKILL:
        kill(process)
    else:
        process.send_signal(number)
    return end(process)


def rows(run: Path) -> list[dict[str, Any]]:
    """The records of ``metrics.jsonl``; a last line that is being written is left out."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return [row for row in found if "training/global_step" in row]


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """By step, what two equal runs have to agree on."""
    return {
        row["training/global_step"]: {
            k: v for k, v in row.items() if not k.startswith(TIMING_PREFIXES)
        }
        for row in rows(run)
    }


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "huggingface" / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    """Equal bit for bit: weights and all metrics that are no times."""
    assert metrics(one) == metrics(other)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert [k for k in mine if not torch.equal(mine[k], theirs[k])] == []
