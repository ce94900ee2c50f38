"""Start, stop and kill small whole runs through the command line, and read their run folders."""

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
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.store import layout, manifest

ROOT = Path(__file__).resolve().parents[2]
MAX_RUN_S = 280.0
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


def wait_for_exit(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and output; a run over ``MAX_RUN_S`` is killed and fails the test."""
    try:
        screen = process.communicate(timeout=MAX_RUN_S)[0]
    except subprocess.TimeoutExpired:
        kill(process)
        raise AssertionError(
            f"the run went on for more than {MAX_RUN_S} s: {process.communicate()[0]}"
        ) from None
    return process.returncode, screen


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the process group of the command; where it started several ranks, they end by themselves
    when it is gone.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def finish(run: Path, *arguments: str, code: int = 0, **env: str) -> str:
    """Run a command to its end, which must have exit code ``code``; return its output."""
    exit_code, screen = wait_for_exit(start(run, *arguments, **env))
    assert exit_code == code, screen
    return screen


def start_held(run: Path, step: int, *arguments: str, **env: str) -> subprocess.Popen[str]:
    """Start a run that waits after ``step`` for a signal, or for the file ``go`` in its folder."""
    held_env = {"PLIMSOLL_WORKER_MODULE": held_worker.__name__, held_worker.HELD_AT: str(step)}
    return start(run, *arguments, **held_env, **env)


def interrupt(
    run: Path, number: int, *arguments: str, step: int, before: int, **env: str
) -> tuple[int, str]:
    """Start a run, send it signal ``number`` after it recorded ``step`` and before it recorded step
    ``before``, and wait for its end.
    """
    process = start_held(run, before - 1, *arguments, **env)
    deadline = time.monotonic() + MAX_RUN_S
    while time.monotonic() < deadline and process.poll() is None:
        if any(row["training/global_step"] >= step for row in rows(run)):
            break
        time.sleep(0.02)
    if number == signal.SIGKILL:
        kill(process)
    else:
        process.send_signal(number)
    return wait_for_exit(process)


def rows(run: Path) -> list[dict[str, Any]]:
    """The steps' records in ``metrics.jsonl``; a half-written last line is skipped."""
    records = []
    with contextlib.suppress(FileNotFoundError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
    return [row for row in records if "training/global_step" in row]


def metrics(run: Path) -> dict[int, dict[str, Any]]:
    """The metrics by step, without those that depend on the clock."""
    return {
        row["training/global_step"]: {
            name: value for name, value in row.items() if not name.startswith(TIMING_PREFIXES)
        }
        for row in rows(run)
    }


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "huggingface" / "model.safetensors")


def assert_same(one: Path, other: Path) -> None:
    """Weights, and all metrics that don't depend on the clock, are equal bit for bit."""
    assert metrics(one) == metrics(other)
    weights_one = weights(one)
    weights_other = weights(other)
    assert weights_one.keys() == weights_other.keys()
    differing = [k for k in weights_one if not torch.equal(weights_one[k], weights_other[k])]
    assert differing == []
    critic_one = critic_weights(one)
    critic_other = critic_weights(other)
    assert critic_one.keys() == critic_other.keys()
    assert all(torch.equal(critic_one[k], critic_other[k]) for k in critic_one)


def critic_weights(run: Path) -> dict[str, torch.Tensor]:
    """The critic's weights in the newest checkpoint; empty without a critic."""
    root = run / layout.FOLDER
    folder = layout.step_dir(root, max(layout.steps_on_disk(root)))
    if not (folder / "critic").is_dir():
        return {}
    reader = CheckpointReader(folder / "critic", manifest.read(folder))
    return {name: reader.read_weight(name) for name in reader.shapes}
