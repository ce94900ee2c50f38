"""Training that generates with vLLM: one step off, through a killed server, and through one that
is not restarted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.e2e.held_worker import GO
from tests.e2e.runs import GRPO, finish, rows, start, start_held, wait_for_exit
from tests.system.vllm_runs import NEEDS_VLLM

pytestmark = NEEDS_VLLM
VLLM_SERVER = [
    *GRPO,
    "actor_rollout_ref.rollout.name=vllm_server",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "trainer.checkpoint.save_freq=-1",
]


def server_pids(parent: int) -> list[int]:
    """Return the servers among the descendants of ``parent``."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
                children.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(
                    int(entry.name)
                )
            except OSError:
                continue
    servers = []
    todo = [parent]
    while todo:
        pid = todo.pop()
        todo += children.get(pid, [])
        try:
            if b"trainer.rollout.vllm.server.serve" in Path(f"/proc/{pid}/cmdline").read_bytes():
                servers.append(pid)
        except OSError:
            continue
    return servers


def wait_for_steps(process: subprocess.Popen[str], run: Path, count: int) -> None:
    deadline = time.monotonic() + 500
    while not (run / "metrics.jsonl").exists() or len(rows(run)) < count:
        assert process.poll() is None, wait_for_exit(process)
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_one_step_off_survives_a_killed_server(tmp_path: Path) -> None:
    arguments = [
        *(word for word in VLLM_SERVER if not word.startswith("trainer.test_freq")),
        "trainer.total_training_steps=12",
        "actor_rollout_ref.rollout.one_step_off=true",
        "algorithm.max_staleness=1",
        "trainer.test_freq=5",  # while older weights generate the responses of the next step
    ]
    process = start_held(tmp_path / "run", 2, *arguments)
    wait_for_steps(process, tmp_path / "run", 2)
    servers = server_pids(process.pid)
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    (tmp_path / "run" / GO).touch()
    code, screen = wait_for_exit(process)
    assert code == 0 and len(servers) == 1, screen
    records = rows(tmp_path / "run")
    assert [row["training/global_step"] for row in records] == list(range(1, 13))
    assert records[0]["training/staleness/max"] == 0
    assert all(row["training/staleness/mean"] == 1 for row in records[1:])
    assert [row["training/global_step"] for row in records if "val/reward" in row] == [5, 10, 12]


def test_a_server_that_is_not_restarted_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [
        *(word for word in VLLM_SERVER if not word.startswith("trainer.test_freq")),
        "trainer.test_freq=1",
    ]
    process = start(
        run,
        *arguments,
        "trainer.total_training_steps=400",
        "actor_rollout_ref.rollout.max_restarts=0",
    )
    wait_for_steps(process, run, 2)
    for pid in server_pids(process.pid):
        os.kill(pid, signal.SIGKILL)
    code, screen = wait_for_exit(process)
    assert code == 1 and "Traceback" not in screen, screen
    last = rows(run)[-1]["training/global_step"]
    assert f"Step {last} is saved; the same command goes on" in screen
    one_more = [*arguments, f"trainer.total_training_steps={last + 1}"]
    assert f"(step {last})" in finish(run, *one_more)


def test_ranks_that_share_an_engine_in_process_train(tmp_path: Path) -> None:
    """ZeRO-3 shards become tensor-parallel shards, and one rank may finish before the other."""
    settings = {
        "trainer.total_training_steps": 3,
        "trainer.n_gpus_per_node": 2,
        "actor_rollout_ref.actor.zero_stage": 3,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
        "actor_rollout_ref.rollout.over_sampling": 1.5,
        "algorithm.max_staleness": 2,
    }
    finish(tmp_path / "run", *GRPO, *(f"{key}={value}" for key, value in settings.items()))
    for row in rows(tmp_path / "run"):
        assert row["training/rollout_probs_diff_mean"] < 1e-6 and row["timing/sync"] > 0
