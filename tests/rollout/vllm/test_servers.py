"""Servers that crash, hang or refuse, and how the trainer recovers; with a fake engine for vLLM."""

from __future__ import annotations

import dataclasses
import http.client
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tests.rollout.vllm.fake_server import BREAK, DIE, FREEZE, GO, HANG, HOLD, REFUSE
from trainer.base.errors import UserError
from trainer.ranks.world import World
from trainer.rollout import EngineFailed, FinishedGroup, Group, Sampling
from trainer.rollout.vllm.client.engine import VllmServerEngine
from trainer.rollout.vllm.client.pool import LocalPool
from trainer.rollout.vllm.client.spec import ServerLimits
from trainer.rollout.vllm.engine.options import Options

SAMPLING = Sampling(max_response_length=6, temperature=0.5)
ROOT = Path(__file__).parents[3]
OPTIONS = Options(
    max_model_len=32,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    tensor_parallel_size=1,
    enable_chunked_prefill=True,
    gpu_memory_utilization=0.5,
    kv_cache_bytes=None,
    dtype="float32",
    on_cpu=True,
)
StartEngine = Callable[..., VllmServerEngine]


class ThreadWorld(World):
    """Two ranks of one node that are threads of this process."""

    barrier = threading.Barrier(2, timeout=300)
    values: ClassVar[list[float]] = [0.0, 0.0]

    def vector(self, value: float) -> list[float]:
        self.values[self.rank] = value
        self.barrier.wait()
        return list(self.values)


def make_world(rank: int = 0, size: int = 1) -> World:
    kind = World if size == 1 else ThreadWorld
    return kind(rank=rank, size=size, local_rank=rank, device=torch.device("cpu"), cpu_group=None)  # type: ignore[arg-type]


def fake_model() -> Any:
    """A loaded model without weights, as far as fake servers read one."""
    return SimpleNamespace(
        model=SimpleNamespace(config=SimpleNamespace(to_dict=dict)),
        tokenizer=SimpleNamespace(save_pretrained=lambda folder: None),
    )


def start_engine(
    folder: Path,
    *,
    world: World | None = None,
    replicas: int = 1,
    dtype: str = "float32",
    timeout_s: float = 200.0,
    restarts: int = 1,
) -> VllmServerEngine:
    """An engine over fake servers, not started."""
    limits = ServerLimits(start_timeout_s=250.0, timeout_s=timeout_s, max_restarts=restarts)
    pool = LocalPool(
        fake_model(),
        world or make_world(),
        folder=folder,
        environments=[{"PYTHONPATH": str(ROOT)}] * replicas,
        limits=limits,
        module="tests.rollout.vllm.fake_server",
    )
    options = dataclasses.replace(OPTIONS, dtype=dtype)
    return VllmServerEngine(pool, options, eos_ids=[1], limits=limits)


@pytest.fixture
def start_with_weights(tmp_path: Path) -> Iterator[StartEngine]:
    """A function that starts engines over fake servers, with weights; closes all afterwards."""
    engines = []

    def start(**options: Any) -> VllmServerEngine:
        engine = start_engine(tmp_path / "vllm", **options)
        engines.append(engine)
        engine.start()
        engine.update_weights([("w", torch.tensor([3.0]))], 1)
        return engine

    yield start
    for engine in engines:
        pids = engine.pool.pids
        engine.close()
        engine.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def groups(*marks: int, size: int = 3, tail: int = 5) -> list[Group]:
    return [
        Group(prompt_ids=[10 + k, *marks, tail], sample_ids=range(size * k, size * (k + 1)), step=2)
        for k in range(4)
    ]


def drawn(
    finished: list[FinishedGroup],
) -> dict[int, list[tuple[list[int], list[float], str, int]]]:
    assert len({f.number for f in finished}) == len(finished)
    return {
        f.number: [
            (s.response_ids.tolist(), s.log_probs.tolist(), s.finish_reason, s.version)
            for s in f.samples
        ]
        for f in finished
    }


def test_groups_weights_and_stops(start_with_weights: StartEngine, tmp_path: Path) -> None:
    engine = start_with_weights(replicas=2)
    first = drawn(list(engine.generate(groups(), SAMPLING, seed=1)))
    assert sorted(first) == [0, 1, 2, 3] and {len(s) for s in first.values()} == {3}
    assert drawn(list(engine.generate(groups(), SAMPLING, seed=1))) == first
    assert (
        engine.stats()["tokens"] == 72
        and engine.stats()["restarts"] == 0
        and 0 < engine.stats()["busy_rows"] <= 1
    )
    ids, log_probs, reason, version = first[0][0]
    assert log_probs == [3.0 - i / 2 for i in ids] and (reason, version) == ("length", 1)
    engine.update_weights([("w", torch.tensor([5.0]))], 2)
    ids, log_probs, _, version = drawn(list(engine.generate(groups(), SAMPLING, seed=1)))[0][0]
    assert log_probs == [5.0 - i / 2 for i in ids] and version == 2
    # A stop returns every group, and its samples can be continued.
    long = Sampling(max_response_length=20)
    under_way = engine.generate(groups(HOLD), long, seed=1)
    left = under_way.stop()
    assert sorted(f.number for f in left) == [0, 1, 2, 3] and under_way.stop() == []
    assert {s.finish_reason for f in left for s in f.samples} == {"aborted"}
    (tmp_path / "vllm" / GO).touch(mode=0o600)
    begun = [
        dataclasses.replace(g, partial_samples=f.samples)
        for g, f in zip(groups(HOLD), left, strict=True)
    ]
    whole = drawn(list(engine.generate(begun, long, seed=1)))
    assert all(len(s[0]) == 20 for samples in whole.values() for s in samples)
    with pytest.raises(EngineFailed, match=r"a vLLM server refused a request.*no such token"):
        list(engine.generate([*groups(), *groups(REFUSE)], SAMPLING, seed=1))
    assert drawn(list(engine.generate(groups(), SAMPLING, seed=1)))[0][0][0] == ids
    for file in (tmp_path / "vllm").iterdir():
        assert file.stat().st_mode & 0o077 == 0, file
    # Requests without the token are refused.
    server = engine.pool.status().slots[0].address  # type: ignore[union-attr]
    for path in ("/health", "/weights"):
        connection = http.client.HTTPConnection(server.host, server.port, timeout=100)
        connection.request(
            "GET" if path == "/health" else "POST", path, "{}", {"Authorization": "Bearer x"}
        )
        assert connection.getresponse().status == 401
        connection.close()


def set_limits(engine: VllmServerEngine, limits: ServerLimits) -> None:
    engine.limits = limits
    for supervisor in engine.pool.servers.supervisors:  # type: ignore[attr-defined]
        supervisor.limits = limits


def test_a_server_that_is_lost_is_replaced_and_no_sample_is_lost_or_doubled(
    start_with_weights: StartEngine,
) -> None:
    engine = start_with_weights(restarts=2)
    long_limits = engine.limits
    expected = drawn(list(engine.generate(groups(size=2), SAMPLING, seed=1)))
    for step, fault in enumerate((DIE, HANG, FREEZE, BREAK), 2):
        # A short time-out only for faults that are silent: a busy machine may be silent as well.
        limits = long_limits
        if fault in (HANG, FREEZE):
            limits = dataclasses.replace(long_limits, timeout_s=4.0, max_restarts=99)
        set_limits(engine, limits)
        engine.update_weights([("w", torch.tensor([3.0]))], step)  # restarts are counted anew
        samples = drawn(list(engine.generate(groups(fault, size=2), SAMPLING, seed=1)))
        assert engine.stats()["restarts"] >= 1 and sorted(samples) == [0, 1, 2, 3]
        assert {k: [s[:3] for s in v] for k, v in samples.items()} == {
            k: [s[:3] for s in v] for k, v in expected.items()
        }
    with pytest.raises(
        EngineFailed,
        match=r"ended with code -9, and .*max_restarts=2 restarts in a row are used up",
    ):
        list(engine.generate(groups(DIE, tail=DIE), SAMPLING, seed=1))
    with pytest.raises(EngineFailed, match="used up"):
        engine.update_weights([("w", torch.tensor([3.0]))], 9)


def test_the_other_ranks_of_a_node_draw_from_the_same_server(tmp_path: Path) -> None:
    def run_rank(number: int) -> dict[int, Any]:
        engine = start_engine(tmp_path / "vllm", world=make_world(number, 2))
        engines[number] = engine
        engine.start()
        weights = iter([("w", torch.tensor([3.0]))])
        engine.update_weights(weights, 1)
        assert next(weights, None) is None  # every rank takes part in gathering them
        return drawn(list(engine.generate(groups(DIE)[number::2], SAMPLING, seed=1)))

    engines: dict[int, VllmServerEngine] = {}
    with ThreadPoolExecutor(2) as threads:
        per_rank = list(threads.map(run_rank, range(2)))
    assert [len(engines[k].pool.pids) for k in (0, 1)] == [1, 0]
    assert any(engine.stats()["restarts"] >= 1 for engine in engines.values())
    engines[1].close()
    alone = drawn(list(engines[0].generate(groups(), SAMPLING, seed=1)))
    assert {2 * k + r: samples[k] for r, samples in enumerate(per_rank) for k in samples} == alone
    engines[0].close()
    with pytest.raises(EngineFailed, match="the engine was closed"):
        engines[1].update_weights([], 2)


def test_a_refusal_of_vllm_is_a_user_error(start_with_weights: StartEngine) -> None:
    with pytest.raises(UserError, match="vLLM refuses this model"):
        start_with_weights(dtype="refused")


def test_no_server_outlives_its_trainer(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch\nfrom pathlib import Path\n"
        "from tests.rollout.vllm.test_servers import start_engine\n"
        "engine = start_engine(Path(sys.argv[1]))\nengine.start()\n"
        "print(engine.pool.pids[0], flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == -9, done.stderr
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 200
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}/exe")
