"""Each setting that vLLM can't work with is one message, before vLLM is loaded."""

from __future__ import annotations

import importlib.util
import re
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.config.helpers import load, minimal_settings, problems
from trainer.base.errors import UserError
from trainer.base.model_shape import ModelShape
from trainer.config.schema import Rollout
from trainer.ranks.world import World
from trainer.rollout.vllm.engine import options as options_module
from trainer.rollout.vllm.engine import resources
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.resources import server_environments

SHAPE = ModelShape(hidden=128, layers=5, heads=4, kv_heads=2, ffn=384, vocab=512, head_dim=32)
GIB = 1 << 30
R = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(resources, "free_host_bytes", lambda: 8 * GIB)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(options_module, "exchange_timeout", lambda world: timedelta(seconds=89.5))


def rollout_config(**changes: Any) -> Rollout:
    base: dict[str, Any] = {
        "name": "vllm",
        "prompt_length": 40,
        "response_length": 88,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.5,
        "enable_chunked_prefill": True,
        "tensor_model_parallel_size": 1,
    }
    rollout = load(minimal_settings()).actor_rollout_ref.rollout
    return rollout.model_copy(update=base | changes)


def world(device: str = "cpu", rank: int = 0, size: int = 1) -> World:
    return World(rank=rank, size=size, local_rank=rank, device=torch.device(device), cpu_group=None)  # type: ignore[arg-type]


def make_options(shape: ModelShape = SHAPE, **changes: Any) -> Options:
    return Options.from_config(rollout_config(**changes), shape, torch.float32, world())


def test_every_key_is_passed_to_vllm() -> None:
    arguments = make_options().engine_args("/m")
    assert arguments["max_model_len"] == 128 and arguments["max_num_seqs"] == 16
    assert (
        arguments["max_num_batched_tokens"] == 256 and arguments["enable_chunked_prefill"] is True
    )
    assert arguments["gpu_memory_utilization"] == 0.5 and arguments["tensor_parallel_size"] == 1
    assert arguments["dtype"] == "float32" and arguments["load_format"] == "dummy"
    assert make_options(max_num_batched_tokens=[300, 200]).max_num_batched_tokens == 300
    assert "max_num_batched_tokens" not in make_options(max_num_batched_tokens="auto").engine_args(
        "/m"
    )
    split = make_options(name="vllm_server", tensor_model_parallel_size=2).engine_args("/m")
    assert (
        split["distributed_executor_backend"] == "mp"
        and arguments["distributed_executor_backend"] == "uni"
    )


def test_ranks_that_share_an_engine_have_equal_options() -> None:
    rollout = rollout_config(
        tensor_model_parallel_size=2, max_num_batched_tokens=[300, 400, 500, 450]
    )
    per_rank = [
        Options.from_config(rollout, SHAPE, torch.float32, world(rank=r, size=4), local_ranks=4)
        for r in range(4)
    ]
    assert [o.max_num_batched_tokens for o in per_rank] == [300, 300, 450, 450]
    arguments = per_rank[3].engine_args("/m")
    assert (
        arguments["distributed_executor_backend"] == "external_launcher"
        and arguments["tensor_parallel_size"] == 2
    )
    assert (
        arguments["distributed_timeout_seconds"]
        == arguments["cpu_distributed_timeout_seconds"]
        == 90
    )
    assert (
        per_rank[0].kv_cache_bytes == make_options().kv_cache_bytes // 2
    )  # one of two key/value heads each
    for ranks, local in ((3, 3), (6, 3)):
        with pytest.raises(
            UserError,
            match=rf"size=2: .*of one node, and there are {local}: set it to a divisor of",
        ):
            Options.from_config(rollout, SHAPE, torch.float32, world(size=ranks), local_ranks=local)


def test_the_cache_holds_all_sequences_or_what_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = 2 * 5 * 2 * 32 * 4
    assert make_options().kv_cache_bytes == (16 * 4 + 1) * 32 * token
    assert make_options(max_num_seqs=10**6, max_num_batched_tokens=10**6).kv_cache_bytes == GIB
    assert (
        Options.from_config(
            rollout_config(max_num_seqs=200_000, max_num_batched_tokens=200_000),
            SHAPE,
            torch.float32,
            world(),
            local_ranks=2,
        ).kv_cache_bytes
        == GIB // 2
    )
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    assert make_options().kv_cache_bytes == 3 * GIB
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1.5")
    with pytest.raises(
        UserError,
        match=r"VLLM_CPU_KVCACHE_SPACE=1\.5 is no number of whole GiB: set it to 1 or more",
    ):
        make_options()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 100},
            "tokens=100 is below the longest",
        ),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens=8 is below .*max_num_seqs=16"),
        ({"tensor_model_parallel_size": 2}, "size=2: an engine in the trainer's process is split"),
        (
            {"name": "vllm_server", "tensor_model_parallel_size": 3},
            "can't be split so; it takes 1, 2, 4",
        ),
        (
            {"response_length": 10**6, "max_num_batched_tokens": 2 * 10**6},
            "one sequence of 1000040 tokens needs",
        ),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_options(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer.n_gpus_per_node": 1},
            "size=2: an engine .* trainer.n_gpus_per_node=1: set it to a divisor of that",
        ),
        (
            {f"{R}.agent.name": "calculator"},
            r"size=2 with .*\.agent\.name=calculator: ranks that share an engine",
        ),
    ],
)
def test_the_config_refuses_settings_that_ranks_can_not_share(
    changes: dict[str, Any], message: str
) -> None:
    shared = {
        f"{R}.name": "vllm",
        f"{R}.tensor_model_parallel_size": 2,
        "trainer.n_gpus_per_node": 2,
    }
    assert problems(minimal_settings(**shared)) == []
    (problem,) = problems(minimal_settings(**{**shared, **changes}))
    assert re.search(message, problem)


def test_models_that_do_not_fit() -> None:
    with pytest.raises(UserError, match=r"heads have 24 features.*Set .*rollout\.name=hf"):
        make_options(ModelShape(hidden=96, layers=5, heads=4, kv_heads=2, ffn=384, vocab=512))


def test_a_machine_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="vLLM is not installed here"):
        make_options()


def test_servers_have_cores_or_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available_cores", lambda: 8)
    monkeypatch.setattr(resources.torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,9")
    assert [
        e["OMP_NUM_THREADS"] for e in server_environments(2, 2, on_cpu=True, training_gpus=4)
    ] == [
        "2",
        "2",
    ]
    environments = server_environments(2, 2, on_cpu=False, training_gpus=4)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["4,5", "6,9"]
    environments = server_environments(2, 2, on_cpu=False, training_gpus=0)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["0,1", "2,3"]
    with pytest.raises(
        UserError,
        match=r"replicas=2 x .*size=2 GPUs of servers and 5 that train are more than the 8",
    ):
        server_environments(2, 2, on_cpu=False, training_gpus=5)
    with pytest.raises(
        UserError,
        match=r"size=2 GPUs of servers are more than the 8 of a node: lower one of them or",
    ):
        server_environments(5, 2, on_cpu=False, training_gpus=0)
