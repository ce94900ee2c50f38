"""The options of a vLLM engine, checked before vLLM is loaded.

vLLM's own refusals come late and as stack traces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from trainer.base.model_shape import ModelShape
from trainer.config.schema import Rollout
from trainer.ranks.world import World
from trainer.rollout.vllm.engine.option_checks import (
    check_supported,
    check_tensor_parallel,
    max_num_batched_tokens,
    ranks_of_engine,
)
from trainer.rollout.vllm.engine.resources import KvCacheDemand, kv_cache_bytes

CPU_BLOCK_SIZE = 32
"""Tokens of a cache block on a CPU. Prompts are shared in whole blocks, and many are shorter than
vLLM's default of 128.
"""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of one engine, in a rank or in a server."""

    max_model_len: int
    """Longest prompt and response together, tokens."""
    max_num_seqs: int
    max_num_batched_tokens: int | None
    """None: vLLM's default."""
    tensor_parallel_size: int
    enable_chunked_prefill: bool
    gpu_memory_utilization: float
    kv_cache_bytes: int | None
    """Of one shard. None on a GPU: vLLM takes its share of the memory. None on a CPU: the engine
    runs on another node, which judges its memory itself.
    """
    dtype: str
    on_cpu: bool
    shard_timeout_s: int | None = None
    """Of a collective between shards that are ranks of the trainer. None: vLLM starts the shards
    as processes of its own.
    """
    kv_cache_demand: KvCacheDemand | None = None
    """Set on a CPU."""

    @classmethod
    def from_config(
        cls,
        rollout: Rollout,
        shape: ModelShape,
        dtype: torch.dtype,
        world: World,
        *,
        local_ranks: int = 1,
    ) -> Options:
        """Build the options of the engine of this rank or node from ``actor_rollout_ref.rollout``.

        ``local_ranks``: ranks on this node.

        Raises :class:`UserError` for a setting that vLLM can't work with, naming the key.
        """
        on_cpu = world.device.type == "cpu"
        length = rollout.prompt_length + rollout.response_length
        check_supported(rollout, shape, on_cpu=on_cpu)
        check_tensor_parallel(rollout, shape, world, local_ranks=local_ranks)
        token_budget = max_num_batched_tokens(rollout, length, world)
        demand = _kv_cache_demand(rollout, shape, dtype, length) if on_cpu else None
        cache_bytes = None
        if demand is not None and not rollout.nnodes:
            engines = rollout.server.replicas if rollout.name == "vllm_server" else local_ranks
            cache_bytes = kv_cache_bytes(demand, engines)
        shard_timeout_s = None
        if len(ranks_of_engine(rollout, world)) > 1:
            shard_timeout_s = math.ceil(exchange_timeout(world).total_seconds())
        return cls(
            max_model_len=length,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=token_budget,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            kv_cache_bytes=cache_bytes,
            dtype=DTYPES[dtype],
            on_cpu=on_cpu,
            kv_cache_demand=demand,
            shard_timeout_s=shard_timeout_s,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Options:
        """Build the options from the result of ``dataclasses.asdict``."""
        demand = values["kv_cache_demand"]
        if demand is not None:
            demand = KvCacheDemand(**demand)
        return cls(**{**values, "kv_cache_demand": demand})

    def engine_args(self, model: str) -> dict[str, Any]:
        """Return arguments for ``vllm.EngineArgs``. ``model`` is a folder without weights."""
        arguments: dict[str, Any] = {
            "model": model,
            "trust_remote_code": False,
            "load_format": "dummy",  # the trainer sends the weights
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_chunked_prefill": self.enable_chunked_prefill,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "block_size": CPU_BLOCK_SIZE if self.on_cpu else None,
            "enforce_eager": self.on_cpu,
            "enable_sleep_mode": not self.on_cpu,
            "generation_config": "vllm",  # nothing from the model's own
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "distributed_executor_backend": self._executor_backend(),
            "distributed_timeout_seconds": self.shard_timeout_s,
            "cpu_distributed_timeout_seconds": self.shard_timeout_s,
            # It needs to see the other shards' GPUs, and a rank may see only its own.
            "disable_custom_all_reduce": None if self.shard_timeout_s is None else True,
            # The sampler needs a token's position, so the token before it has to be known.
            "async_scheduling": False,
            "worker_extension_cls": "trainer.rollout.vllm.engine.worker_extension.Extension",
            "seed": 0,
        }
        return {key: value for key, value in arguments.items() if value is not None}

    def _executor_backend(self) -> str:
        if self.tensor_parallel_size == 1:
            return "uni"
        return "mp" if self.shard_timeout_s is None else "external_launcher"


def exchange_timeout(world: World) -> timedelta:
    """Return the time-out of the trainer's own exchanges over the CPU."""
    backend: Any = world.cpu_group._get_backend(torch.device("cpu"))
    timeout: timedelta = backend.options._timeout
    return timeout


def _kv_cache_demand(
    rollout: Rollout, shape: ModelShape, dtype: torch.dtype, length: int
) -> KvCacheDemand:
    """Return the bytes that sequences of ``length`` tokens take, with one spare block."""
    heads = max(1, shape.kv_heads // rollout.tensor_model_parallel_size)
    block_bytes = CPU_BLOCK_SIZE * 2 * shape.layers * heads * shape.head_size * dtype.itemsize
    blocks = -(-length // CPU_BLOCK_SIZE)
    return KvCacheDemand(
        max_model_len=length,
        min_bytes=(blocks + 1) * block_bytes,
        max_bytes=(blocks * rollout.max_num_seqs + 1) * block_bytes,
        memory_share=rollout.gpu_memory_utilization,
    )
