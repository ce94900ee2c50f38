"""A Slurm job with vLLM servers on a second node trains as one that generates on its own node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs import ledger
from jobs.slurm import Slurm
from tests.e2e.runs import finish, rows
from tests.system import digits_reward
from tests.system.slurm_runs import causes, wait
from tests.system.test_slurm_sweep import COMMON, Lab
from tests.system.vllm_runs import MAX_PROBS_DIFF, NEEDS_VLLM

pytestmark = [NEEDS_VLLM, pytest.mark.system, pytest.mark.timeout(3600)]
RUN = [
    "data.num_workers=0",
    "data.val_max_samples=2",
    "trainer.test_freq=-1",
    "trainer.checkpoint.save_freq=-1",
    "trainer.plot_interval=1000",
    "trainer.enable_monitor=false",
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "trainer.n_gpus_per_node=1",
]


@pytest.fixture
def nodes(slurm_lab: Path, tmp_path: Path) -> Lab:
    lab = Lab(tmp_path)
    del lab.env["PLIMSOLL_WORKER_MODULE"]
    return lab


def processes_of(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield processes with ``folder`` on their command line: process id and command."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if str(folder) in words:
                yield int(entry.name), words


def assert_same_first_step(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The first steps agree but for a token or two: two engines' kernels round differently, so that
    the same random number may draw another token where it falls between two.

    Later steps train on that, and need not agree.
    """
    assert one["prompt_length/mean"] == other["prompt_length/mean"]
    assert one["critic/score/mean"] == pytest.approx(other["critic/score/mean"], rel=0.02)
    assert one["actor/entropy"] == pytest.approx(other["actor/entropy"], rel=1e-3)


def test_a_run_with_a_node_of_servers_survives_the_loss_of_one(nodes: Lab, tmp_path: Path) -> None:
    servers = [
        "actor_rollout_ref.rollout.name=vllm_server",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    ]
    # Pauses after one step, until a server was lost.
    reward = digits_reward.held_copy(tmp_path / "reward", 8)
    path = "custom_reward_function.path"
    overrides = [*RUN, *servers, f"{path}={reward}", "hydra.launcher.timeout_min=60"]
    output = nodes.sweep("served", "container=none", *overrides).stdout
    assert "each 2 node(s) x 1 GPU(s), 1 of them for vLLM servers only" in output
    (entry,) = ledger.read(tmp_path / "ledger.jsonl")[-1:]
    run = Path(entry.run)
    wait(lambda: rows(run), "the first step", entry)
    lost = [pid for pid, words in processes_of(run) if "trainer.rollout.vllm.server.serve" in words]
    assert len(lost) == 1 and str(run / "vllm/rollout_node_0") in dict(processes_of(run))[lost[0]]
    os.kill(lost[0], signal.SIGKILL)
    reward.with_name("hold").unlink()
    common = [word for word in COMMON if not word.startswith(("cluster", "trainer.total"))]
    # The same run with the hf engine, while the job goes on.
    finish(
        tmp_path / "alone", *common, *RUN, f"{path}={digits_reward.__file__}", "trainer.device=cpu"
    )
    wait(lambda: causes(entry), "the end", entry)
    assert causes(entry) == ["done"] and (run / "vllm/rollout_node_0/server_0.2.log").exists()
    wait(lambda: not list(processes_of(run)), "the end of its processes", entry)
    wait(
        lambda: Slurm(timeout_s=300).accounting([entry.job])[entry.job].state == "COMPLETED",
        "the state in Slurm's accounting",
        entry,
    )
    with_servers = rows(run)
    with_hf = rows(tmp_path / "alone")
    assert len(with_servers) == len(with_hf) == 3
    assert_same_first_step(with_servers[0], with_hf[0])
    for by_vllm, by_hf in zip(with_servers, with_hf, strict=True):
        assert by_vllm["prompt_length/mean"] == by_hf["prompt_length/mean"]
        assert by_vllm["training/rollout_probs_diff_mean"] < MAX_PROBS_DIFF
        assert by_vllm["timing/sync"] > 0
        assert by_vllm["actor/grad_norm"] > 0
