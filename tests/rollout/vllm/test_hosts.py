"""Servers on nodes of their own: real hosts in processes of their own, without vLLM."""

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
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.helpers import load, run_of
from tests.rollout.vllm.fake_server import GO, HOLD
from tests.rollout.vllm.test_servers import ROOT, SAMPLING, drawn, groups, world
from trainer.base.environment import RankInfo, RolloutTask
from trainer.base.errors import UserError
from trainer.config import freeze
from trainer.launch import rollout_nodes
from trainer.launch.rollout_nodes import Address
from trainer.rollout import EngineFailed, Sampling
from trainer.rollout.vllm.client.engine import VllmServerEngine
from trainer.rollout.vllm.client.resources import Cache
from trainer.rollout.vllm.client.status_file import LOOPBACK
from trainer.rollout.vllm.client.supervisor import Limits, ask
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.nodes import agent as module
from trainer.rollout.vllm.nodes.agent import Host, own_address
from trainer.rollout.vllm.nodes.remote_pool import Hosts
from trainer.rollout.vllm.server.http import Guarded, serve_in_threads
from trainer.rollout.vllm.server.shared_weights import Reader

R = "actor_rollout_ref.rollout"
OPTIONS = Options(
    max_model_len=32,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    tensor_parallel_size=1,
    chunked_prefill=True,
    gpu_memory_utilization=0.5,
    cache_bytes=None,
    dtype="float32",
    on_cpu=True,
    cache=Cache(length=32, least=1, wanted=1, share=0.5),
)
ME = RankInfo(
    rank=0, world_size=1, local_rank=0, local_world_size=1, master_addr="h", master_port=None
)


def engine_over(
    addresses: list[Address], run: Path, *, timeout_s: float = 200.0, replicas: int = 1
) -> VllmServerEngine:
    model = SimpleNamespace(config=SimpleNamespace(to_dict=dict))
    loaded: Any = SimpleNamespace(
        model=model, tokenizer=SimpleNamespace(save_pretrained=lambda folder: None)
    )
    limits = Limits(start_timeout_s=250.0, timeout_s=timeout_s, max_restarts=2)
    fleet = Hosts(
        addresses,
        loaded,
        world(),
        local_ranks=1,
        run_dir=run,
        replicas=replicas,
        limits=limits,
        module="tests.rollout.vllm.fake_server",
    )
    return VllmServerEngine(fleet, OPTIONS, eos_ids=[1], limits=limits)


def pids_below(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(parent):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def until(true: Callable[[], bool], seconds: float = 200.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def start_hosts(
    run: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> list[subprocess.Popen[str]]:
    """Workers on the last ``count`` nodes of a job, which has one that trains."""
    wanted = load(
        run_of(**{f"{R}.name": "vllm_server", f"{R}.nnodes": count, "trainer.join_timeout_s": 400})
    )
    freeze(wanted, run)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "3")
    env = os.environ | {
        "PLIMSOLL_SLURM": "1",
        "PLIMSOLL_ROLLOUT_NODES": str(count),
        "SLURM_NTASKS": str(1 + count),
        "SLURM_STEP_TASKS_PER_NODE": f"1(x{1 + count})",
        "MASTER_ADDR": LOOPBACK,
        "PYTHONPATH": str(ROOT),
    }
    place = [{k: str(n) for k in ("SLURM_PROCID", "SLURM_NODEID")} for n in range(1, 1 + count)]
    return [
        subprocess.Popen(
            [sys.executable, "-m", "trainer.worker", str(run)],
            env=env | mine | {"SLURM_LOCALID": "0", "SLURMD_NODENAME": f"n{mine['SLURM_NODEID']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for mine in place
    ]


def test_hosts_keep_servers_until_rank_0_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = start_hosts(tmp_path, monkeypatch, 2)
    config = load(run_of(**{f"{R}.name": "vllm_server", f"{R}.nnodes": 2}))
    try:
        with rollout_nodes.held(config, tmp_path, ME):
            addresses = rollout_nodes.find(tmp_path, 2, 1.0)
            for node in range(2):
                assert rollout_nodes.note(tmp_path, node).stat().st_mode & 0o077 == 0
            engine = engine_over(addresses, tmp_path)
            engine.start()
            servers = [pids_below(p.pid) for p in processes]
            assert [len(pids) for pids in servers] == [1, 1]
            engine.update_weights([("w", torch.tensor([3.0]))], 1)
            state = engine.fleet.read()
            assert state is not None and [s.version for s in state.seats] == [1, 1]
            whole = drawn(list(engine.generate(groups(), SAMPLING, seed=1)))
            ids, log_probs, *_ = whole[0][0]
            assert log_probs == [3.0 - i / 2 for i in ids] and sorted(whole) == [0, 1, 2, 3]
            # A server dies while it draws, and the host is asked to stop as ranks are: nothing is
            # lost.
            long = Sampling(max_response_length=20)
            go = [module.folder_of(tmp_path, node) / GO for node in range(2)]
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
            # A host is lost: an error, and soon.
            processes[1].kill()
            with pytest.raises(
                EngineFailed, match=r"host of vLLM servers at 127.0.0.1:\d+ \(number 1 of"
            ):
                list(engine.generate(groups(), SAMPLING, seed=1))
            with pytest.raises(EngineFailed, match="is lost"):
                engine.update_weights(iter([("w", torch.tensor([3.0]))]), 2)
            assert processes[0].poll() is None
        said, _ = processes[0].communicate(timeout=200)
        assert processes[0].returncode == 0 and "Rank 0 has ended" in said, said
        assert not any(addresses[0].token in text for text in (said, *command_lines()))
        until(
            lambda: not any(Path(f"/proc/{pid}/exe").exists() for pids in servers for pid in pids)
        )
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def command_lines() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.append((entry / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
    return found


@pytest.fixture
def two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[list[Host], list[Address]]]:
    """Hosts in this process."""
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    hosts = [Host(tmp_path, ip=LOOPBACK, token=f"t{k}", tasks=1) for k in range(2)]
    ports = [
        serve_in_threads(LOOPBACK, module._handler(host, f"t{k}")) for k, host in enumerate(hosts)
    ]
    yield hosts, [Address(host=LOOPBACK, port=port, token=f"t{k}") for k, port in enumerate(ports)]
    for host in hosts:
        host.close()


def test_weights_arrive_as_they_are(two: Any, tmp_path: Path) -> None:
    hosts, addresses = two
    engine = engine_over(addresses, tmp_path)
    made = {
        "a": torch.randn(300, 70),
        "b": torch.randn(1000, 3).bfloat16(),
        "c": torch.randn(7).half(),
        "d": torch.tensor(2.5),
        "e": torch.randn(40, 50).t(),
    }
    for version in (1, 2):
        weights = {name: tensor * version for name, tensor in made.items()}
        engine.fleet.take(weights.items(), version)
        for host in hosts:
            shared = host._servers._kept.shared
            found = dict(Reader().read(shared.path, shared.table))
            assert found.keys() == weights.keys() and host._servers._kept.version == version
            assert all(
                torch.equal(found[k], weights[k]) and found[k].dtype == weights[k].dtype
                for k in weights
            )
    # What does not fit, or ends early, is known to every rank; the weights are read to their end
    # all the same.
    for host in hosts:
        host._notice.begin(0)
    others = engine_over(addresses, tmp_path)
    asked = iter([("a", torch.zeros(3)), *list(made.items())[1:]])
    engine.fleet.take(asked, 3)
    assert next(asked, None) is None
    for view in (engine, others):
        state = view.fleet.read()
        assert state is not None
        assert (
            "the weights of step 3 did not arrive: there is no room for a, torch.float32 [3]"
            in state.failed
        )

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", made["a"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        others.fleet.take(broken(), 4)
    assert hosts[0]._servers._kept.version is None


def test_nobody_without_the_token(two: Any) -> None:
    _, addresses = two
    wrong = Address(host=LOOPBACK, port=addresses[0].port, token="x")
    for method, path in (
        ("GET", "/state"),
        ("POST", "/begin"),
        ("POST", "/weights/1"),
        ("POST", "/close"),
    ):
        assert ask(wrong, method, path, {}, timeout_s=100) == {"error": "no valid token"}
    with pytest.raises(ConnectionError, match="401"):
        rollout_nodes.hold(wrong, rollout_nodes.LIFE)
    assert ask(addresses[0], "GET", "/nothing", timeout_s=100) == {"error": "no /nothing"}
    assert "t0" not in repr(addresses[0])


def test_who_shows_no_token_is_hung_up_on(two: Any, monkeypatch: Any) -> None:
    _, addresses = two
    monkeypatch.setattr(Guarded, "timeout", 0.2)
    with socket.create_connection((LOOPBACK, addresses[0].port), timeout=100) as stranger:
        stranger.sendall(b"GET /state HTTP/1.1\r\n")
        assert stranger.recv(1) == b""
    with socket.socket() as connection:
        connection.settimeout(0.2)
        known: Any = SimpleNamespace(
            headers={"Authorization": "Bearer t"}, wanted="Bearer t", connection=connection
        )
        assert not Guarded.refused(known)
        assert connection.gettimeout() is None, "who has the token may take any time"


def test_a_host_judges_its_own_node(two: Any, tmp_path: Path) -> None:
    _, addresses = two
    engine = engine_over(addresses, tmp_path)
    huge = Cache(length=32, least=1 << 60, wanted=1 << 61, share=0.5)
    engine.options = dataclasses.replace(OPTIONS, cache=huge)
    with pytest.raises(UserError, match=r"node n7: .*one sequence of 32 tokens needs"):
        engine.start()


def test_the_other_processes_of_a_node_lend_their_cores_and_wait(
    two: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    hosts, addresses = two
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "1")
    freeze(load(run_of(**{f"{R}.name": "vllm_server", f"{R}.nnodes": 1})), tmp_path)
    rollout_nodes.publish(tmp_path, 0, addresses[0])
    before = os.sched_getaffinity(0)
    ends: list[int] = []
    task = RolloutTask(node=0, local_id=1, tasks=2, master_addr=LOOPBACK)
    waiting = threading.Thread(
        target=lambda: ends.append(rollout_nodes.run_task(tmp_path, task)), daemon=True
    )
    waiting.start()
    assert hosts[0]._company.acquire(timeout=200) and hosts[0]._cores == set(before)
    assert waiting.is_alive() and ends == []


def test_a_host_that_is_silent_is_lost_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rollout.vllm.nodes.remote_pool.STATE_S", 0.1)
    with socket.socket() as mute:
        mute.bind((LOOPBACK, 0))
        mute.listen()
        address = Address(host=LOOPBACK, port=mute.getsockname()[1], token="t")
        fleet = engine_over([address], tmp_path, timeout_s=0.3).fleet
        assert fleet.read() is None
        until(lambda: (state := fleet.read()) is not None and "is lost: " in state.failed)


def test_hosts_that_do_not_come_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "1")
    rollout_nodes.publish(tmp_path, 0, Address(host="h", port=1, token="t"))
    with pytest.raises(
        TimeoutError, match=r"1 of 2 nodes for .* did not come within 0.1 s: number 1"
    ):
        rollout_nodes.find(tmp_path, 2, 0.1)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "2")  # an earlier attempt's note is none
    with pytest.raises(TimeoutError, match="2 of 2"):
        rollout_nodes.find(tmp_path, 2, 0.1)


def test_the_own_address() -> None:
    assert own_address("127.0.0.1") == LOOPBACK
    with pytest.raises(
        UserError, match=r"no way to no\.such\.host\.invalid, rank 0's node .*set MASTER_ADDR"
    ):
        own_address("no.such.host.invalid")


def test_only_a_slurm_job_has_such_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(run_of(**{f"{R}.name": "vllm_server", f"{R}.nnodes": 1}))
    with pytest.raises(
        UserError, match=r"nnodes=1 puts .* on nodes of their own.*add -m hydra/launcher=slurm"
    ):
        rollout_nodes.require(config)
    monkeypatch.setenv("PLIMSOLL_SLURM", "1")
    monkeypatch.setenv("PLIMSOLL_ROLLOUT_NODES", "1")
    rollout_nodes.require(config)
