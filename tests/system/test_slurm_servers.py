"""A Slurm job whose last node only holds vLLM servers trains as one that generates by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import ledger
from jobs.slurm import Slurm
from tests.e2e.runs import finish, rows
from tests.system import digits_reward
from tests.system.slurm_runs import causes, wait
from tests.system.test_slurm_sweep import COMMON, Lab
from tests.system.vllm_runs import NEEDS_VLLM

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
SAME = ("critic/score/mean", "response_length/mean", "response_length/max", "prompt_length/mean")
CLOSE = ("actor/grad_norm", "actor/entropy", "actor/pg_loss")


@pytest.fixture
def nodes(slurm_lab: Path, tmp_path: Path) -> Lab:
    found = Lab(tmp_path)
    del found.env["PLIMSOLL_WORKER_MODULE"]
    return found


def processes_of(folder: Path) -> Iterator[tuple[int, str]]:
    """What runs with ``folder`` on its command line."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_text(errors="replace").replace("\0", " ")
            except OSError:
                continue
            if str(folder) in words:
                yield int(entry.name), words


def test_a_node_of_servers_through_the_loss_of_one(nodes: Lab, tmp_path: Path) -> None:
    servers = [
        "actor_rollout_ref.rollout.name=vllm_server",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    ]
    reward = digits_reward.held_copy(
        tmp_path / "reward", 8
    )  # one step: the others come when a server was lost
    path = "custom_reward_function.path"
    given = [*RUN, *servers, f"{path}={reward}", "hydra.launcher.timeout_min=60"]
    said = nodes.sweep("served", "container=none", *given).stdout
    assert "each 2 node(s) x 1 GPU(s), 1 of them for vLLM servers only" in said
    (entry,) = ledger.read(tmp_path / "ledger.jsonl")[-1:]
    run = Path(entry.run)
    wait(lambda: rows(run), "the first step", entry)
    lost = [pid for pid, words in processes_of(run) if "trainer.rollout.vllm.server.serve" in words]
    assert len(lost) == 1 and str(run / "vllm/rollout_node_0") in dict(processes_of(run))[lost[0]]
    os.kill(lost[0], signal.SIGKILL)
    reward.with_name("hold").unlink()
    own = [word for word in COMMON if not word.startswith(("cluster", "trainer.total"))]
    finish(
        tmp_path / "alone", *own, *RUN, f"{path}={digits_reward.__file__}", "trainer.device=cpu"
    )  # by hf, meanwhile
    wait(lambda: causes(entry), "the end", entry)
    assert causes(entry) == ["done"] and (run / "vllm/rollout_node_0/server_0.2.log").exists()
    wait(lambda: not list(processes_of(run)), "the end of its processes", entry)
    wait(
        lambda: Slurm(timeout_s=300).accounting([entry.job])[entry.job].state == "COMPLETED",
        "Slurm's word",
        entry,
    )
    mine, theirs = rows(run), rows(tmp_path / "alone")
    assert len(mine) == len(theirs) == 3
    for one, other in zip(mine, theirs, strict=True):
        assert {name: one[name] for name in SAME} == {name: other[name] for name in SAME}
        assert [one[name] for name in CLOSE] == pytest.approx(
            [other[name] for name in CLOSE], rel=1e-3, abs=1e-6
        )
        assert one["training/rollout_probs_diff_mean"] < 1e-6 and one["timing/sync"] > 0
    assert any(row["actor/grad_norm"] > 0 for row in mine)
