"""Servers on nodes that train nothing: real node agents in processes of their own, without vLLM."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.helpers import load, minimal_settings
from tests.rollout.vllm import test_servers
from tests.rollout.vllm.fake_server import GO, HOLD
from tests.rollout.vllm.test_servers import (
    ROOT,
    SAMPLING,
    drawn,
    fake_model,
    groups,
    make_world,
)
from trainer import worker
from trainer.base.connections import LOOPBACK, Address
from trainer.base.errors import PeerLost, UserError
from trainer.base.rank_info import RankInfo, RolloutTask
from trainer.config import freeze
from trainer.launch import rollout_nodes
from trainer.rollout import EngineFailed, Sampling
from trainer.rollout.vllm.client.engine import VllmServerEngine
from trainer.rollout.vllm.client.json_request import try_send_json
from trainer.rollout.vllm.client.spec import ServerLimits
from trainer.rollout.vllm.engine.resources import KvCacheDemand
from trainer.rollout.vllm.engine.shared_weights import SharedWeightsReader
from trainer.rollout.vllm.nodes.agent import NodeAgent, servers_folder
from trainer.rollout.vllm.nodes.agent_http import bound_handler
from trainer.rollout.vllm.nodes.agent_process import address_towards
from trainer.rollout.vllm.nodes.remote_pool import RemotePool
from trainer.rollout.vllm.server.http import serve_in_threads

R = "actor_rollout_ref.rollout"
OPTIONS = dataclasses.replace(
    test_servers.OPTIONS,
    kv_cache_demand=KvCacheDemand(max_model_len=32, min_bytes=1, max_bytes=1, memory_share=0.5),
)
RANK_0 = RankInfo(
    rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="h", master_port=None
)


def engine_over(
    addresses: list[Address], run: Path, *, timeout_s: float = 200.0, replicas: int = 1
) -> VllmServerEngine:
    limits = ServerLimits(start_timeout_s=250.0, timeout_s=timeout_s, max_restarts=2)
    pool = RemotePool(
        addresses,
        fake_model(),
        make_world(),
        local_ranks=1,
        run_dir=run,
        replicas=replicas,
        limits=limits,
        module="tests.rollout.vllm.fake_server",
    )
    return VllmServerEngine(pool, OPTIONS, eos_ids=[1], limits=limits)


def child_pids(parent: int) -> list[int]:
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(parent):
                    pids.append(int(entry.name))
            except OSError:
                continue
    return pids


def wait_until(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start_agents(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> list[subprocess.Popen[str]]:
    """Start workers on the last ``count`` nodes of a job, of which one more trains."""
    config = load(
        minimal_settings(
            **{f"{R}.name": "vllm_server", f"{R}.nnodes": count, "trainer.join_timeout_s": 400}
        )
    )
    freeze(config, run)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "3")
    env = os.environ | {
        "PLIMSOLL_SLURM": "1",
        "PLIMSOLL_ROLLOUT_NODES": str(count),
        "SLURM_NTASKS": str(1 + count),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{1 + count})",
        "MASTER_ADDR": LOOPBACK,
        "PYTHONPATH": str(ROOT),
    }
    variables = [{k: str(n) for k in ("SLURM_PROCID", "SLURM_NODEID")} for n in range(1, 1 + count)]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.worker", str(run)],
            env=env
            | of_node
            | {"SLURM_LOCALID": "0", "SLURMD_NODENAME": f"n{of_node['SLURM_NODEID']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for of_node in variables
    ]


def test_agents_supervise_servers_until_rank_0_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = start_agents(tmp_path, monkeypatch, 2)
    config = load(minimal_settings(**{f"{R}.name": "vllm_server", f"{R}.nnodes": 2}))
    try:
        with rollout_nodes.lifelines(config, tmp_path, RANK_0):
            addresses = rollout_nodes.find_agents(tmp_path, 2, 1.0)
            for node in range(2):
                assert rollout_nodes.address_file(tmp_path, node).stat().st_mode & 0o077 == 0
            engine = engine_over(addresses, tmp_path)
            engine.start()
            servers = [child_pids(p.pid) for p in processes]
            assert [len(pids) for pids in servers] == [1, 1]
            engine.update_weights([("w", torch.tensor([3.0]))], 1)
            status = engine.pool.status()
            assert status is not None and [s.version for s in status.slots] == [1, 1]
            whole = drawn(list(engine.generate(groups(), SAMPLING, seed=1)))
            ids, log_probs, *_ = whole[0][0]
            assert log_probs == [3.0 - i / 2 for i in ids] and sorted(whole) == [0, 1, 2, 3]
            # A server dies while it draws, and the agent gets the signals by which ranks are asked
            # to stop: nothing is lost.
            long = Sampling(max_response_length=20)
            go = [servers_folder(tmp_path, node) / GO for node in range(2)]
            for file in go:
                file.touch()
            expected = drawn(list(engine.generate(groups(HOLD), long, seed=1)))
            for file in go:
                file.unlink()
            under_way = engine.generate(groups(HOLD), long, seed=1)
            os.kill(servers[1][0], signal.SIGKILL)
            for number in (signal.SIGUSR2, signal.SIGTERM):
                processes[0].send_signal(number)
            for file in go:
                file.touch()
            assert drawn(list(under_way)) == expected and engine.stats()["restarts"] == 1
            # An agent is lost: an error, and soon.
            processes[1].kill()
            with pytest.raises(
                EngineFailed, match=r"node agent of vLLM servers at 127.0.0.1:\d+ \(number 1 of"
            ):
                list(engine.generate(groups(), SAMPLING, seed=1))
            with pytest.raises(EngineFailed, match="is lost"):
                engine.update_weights(iter([("w", torch.tensor([3.0]))]), 2)
            assert processes[0].poll() is None
        output, _ = processes[0].communicate(timeout=200)
        assert processes[0].returncode == 0 and "Rank 0 has ended" in output, output
        assert not any(addresses[0].token in text for text in (output, *command_lines()))
        wait_until(
            lambda: not any(Path(f"/proc/{pid}/exe").exists() for pids in servers for pid in pids)
        )
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def command_lines() -> list[str]:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
    return lines


@pytest.fixture
def agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[NodeAgent], list[Address]]]:
    """Two node agents in this process, and their addresses."""
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    two = [NodeAgent(tmp_path, ip=LOOPBACK, token=f"t{k}", tasks=1) for k in range(2)]
    ports = [
        serve_in_threads(LOOPBACK, bound_handler(agent, f"t{k}")) for k, agent in enumerate(two)
    ]
    yield two, [Address(host=LOOPBACK, port=port, token=f"t{k}") for k, port in enumerate(ports)]
    for agent in two:
        agent.close()


def test_weights_arrive_as_they_are(agents: Any, tmp_path: Path) -> None:
    two, addresses = agents
    engine = engine_over(addresses, tmp_path)
    tensors = {
        "a": torch.randn(300, 70),
        "b": torch.randn(1000, 3).bfloat16(),
        "c": torch.randn(7).half(),
        "d": torch.tensor(2.5),
        "e": torch.randn(40, 50).t(),
    }
    for version in (1, 2):
        weights = {name: tensor * version for name, tensor in tensors.items()}
        engine.pool.update_weights(weights.items(), version)
        for agent in two:
            store = agent.servers.weights
            arrived = dict(SharedWeightsReader().read(store.shared.path, store.shared.table))
            assert arrived.keys() == weights.keys() and store.version == version
            assert all(
                torch.equal(arrived[k], weights[k]) and arrived[k].dtype == weights[k].dtype
                for k in weights
            )
    # Every rank learns of weights that do not fit or end early; all are consumed nevertheless.
    for agent in two:
        agent.status_file.create(0)
    others = engine_over(addresses, tmp_path)
    weights_left = iter([("a", torch.zeros(3)), *list(tensors.items())[1:]])
    engine.pool.update_weights(weights_left, 3)
    assert next(weights_left, None) is None
    for view in (engine, others):
        status = view.pool.status()
        assert status is not None
        assert (
            "the weights of step 3 did not arrive: there is no room for a, torch.float32 [3]"
            in status.failed
        )

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", tensors["a"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        others.pool.update_weights(broken(), 4)
    assert two[0].servers.weights.version is None


def test_requests_without_the_token_are_refused(agents: Any) -> None:
    _, addresses = agents
    wrong = Address(host=LOOPBACK, port=addresses[0].port, token="x")
    for method, path in (
        ("GET", "/status"),
        ("POST", "/start"),
        ("POST", "/weights/1"),
        ("POST", "/close"),
    ):
        assert try_send_json(wrong, method, path, {}, timeout_s=100) == {"error": "no valid token"}
    with pytest.raises(ConnectionError, match="401"):
        rollout_nodes.connect(wrong, rollout_nodes.LIFELINE_PATH)
    assert try_send_json(addresses[0], "GET", "/nothing", timeout_s=100) == {"error": "no /nothing"}
    assert "t0" not in repr(addresses[0])


def test_an_agent_judges_its_own_node(agents: Any, tmp_path: Path) -> None:
    _, addresses = agents
    engine = engine_over(addresses, tmp_path)
    huge = KvCacheDemand(max_model_len=32, min_bytes=1 << 60, max_bytes=1 << 61, memory_share=0.5)
    engine.options = dataclasses.replace(OPTIONS, kv_cache_demand=huge)
    with pytest.raises(UserError, match=r"node n7: .*one sequence of 32 tokens needs"):
        engine.start()


def test_the_other_processes_of_a_node_lend_their_cores_and_wait(
    agents: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    two, addresses = agents
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "1")
    freeze(load(minimal_settings(**{f"{R}.name": "vllm_server", f"{R}.nnodes": 1})), tmp_path)
    rollout_nodes.publish_address(tmp_path, 0, addresses[0])
    before = os.sched_getaffinity(0)
    exit_codes: list[int] = []
    task = RolloutTask(node=0, local_id=1, tasks=2, master_addr=LOOPBACK)
    waiting = threading.Thread(
        target=lambda: exit_codes.append(worker.run_on_rollout_node(tmp_path, task)), daemon=True
    )
    waiting.start()
    assert two[0].peers.acquire(timeout=200) and two[0].cores == set(before)
    assert waiting.is_alive() and exit_codes == []


def test_a_silent_agent_is_lost_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rollout.vllm.nodes.remote_pool.STATUS_TIMEOUT_S", 0.1)
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        silent.listen()
        address = Address(host=LOOPBACK, port=silent.getsockname()[1], token="t")
        pool = engine_over([address], tmp_path, timeout_s=0.3).pool
        assert pool.status() is None

        def is_lost() -> bool:
            status = pool.status()
            return status is not None and "is lost: " in status.failed

        wait_until(is_lost)


def test_agents_that_do_not_come_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "1")
    rollout_nodes.publish_address(tmp_path, 0, Address(host="h", port=1, token="t"))
    with pytest.raises(PeerLost, match=r"1 of 2 nodes for .* did not come within 0.1 s: number 1"):
        rollout_nodes.find_agents(tmp_path, 2, 0.1)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "2")  # the file of an earlier attempt does not count
    with pytest.raises(PeerLost, match="2 of 2"):
        rollout_nodes.find_agents(tmp_path, 2, 0.1)


def test_the_address_towards_another_machine() -> None:
    assert address_towards("127.0.0.1") == LOOPBACK
    with pytest.raises(
        UserError, match=r"no way to no\.such\.host\.invalid, rank 0's node .*set MASTER_ADDR"
    ):
        address_towards("no.such.host.invalid")


def test_only_a_slurm_job_has_such_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(minimal_settings(**{f"{R}.name": "vllm_server", f"{R}.nnodes": 1}))
    with pytest.raises(
        UserError, match=r"nnodes=1 puts .* on nodes of their own.*add -m hydra/launcher=slurm"
    ):
        rollout_nodes.require(config)
    monkeypatch.setenv("PLIMSOLL_SLURM", "1")
    monkeypatch.setenv("PLIMSOLL_ROLLOUT_NODES", "1")
    rollout_nodes.require(config)
