"""What vLLM is told, checked before it is loaded: its own refusals come late and as stack
traces.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from typing import Any

import torch

from trainer.base.errors import UserError
from trainer.batching.cost import ModelShape
from trainer.config.schema import Rollout
from trainer.ranks.world import World
from trainer.rollout.settings import KEY
from trainer.rollout.vllm.client.resources import Cache, cache_bytes
from trainer.rollout.vllm.in_process.shards import patience

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Features of a head that vLLM's attention on a CPU is built for."""
CPU_BLOCK = 32
"""Tokens of a cache block on a CPU: prompts are shared in whole blocks, and vLLM's own 128 is
longer than many.
"""
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an engine of one rank or one server gets."""

    max_model_len: int
    """Longest prompt and response together, tokens."""
    max_num_seqs: int
    max_num_batched_tokens: int | None
    """None: vLLM's own."""
    tensor_parallel_size: int
    chunked_prefill: bool
    gpu_memory_utilization: float
    cache_bytes: int | None
    """Of keys and values, of one shard. None on a GPU: what the share of its memory leaves. None on
    a CPU: not yet judged, since the engine runs on another node.
    """
    dtype: str
    on_cpu: bool
    ranks_timeout_s: int | None = None
    """Of an exchange between shards that are ranks of the trainer. None: they are processes below
    its own.
    """
    cache: Cache | None = None
    """What the cache is for, on a CPU."""

    @staticmethod
    def of(found: dict[str, Any]) -> Options:
        """From what ``asdict`` made of one."""
        return Options(**{**found, "cache": found["cache"] and Cache(**found["cache"])})

    def arguments(self, model: str) -> dict[str, Any]:
        """As ``vllm.EngineArgs``; ``model`` is a folder without weights."""
        wanted: dict[str, Any] = {
            "model": model,
            "load_format": "dummy",  # the trainer sends them
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enable_chunked_prefill": self.chunked_prefill,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self.cache_bytes,
            "block_size": CPU_BLOCK if self.on_cpu else None,
            "enforce_eager": self.on_cpu,
            "enable_sleep_mode": not self.on_cpu,
            "generation_config": "vllm",  # nothing from the model's own
            "skip_tokenizer_init": True,
            "disable_log_stats": True,
            "distributed_executor_backend": self._executor(),
            "distributed_timeout_seconds": self.ranks_timeout_s,
            "cpu_distributed_timeout_seconds": self.ranks_timeout_s,
            # It wants to see the others' GPUs, and a rank may see its own only.
            "disable_custom_all_reduce": None if self.ranks_timeout_s is None else True,
            # a token is drawn by its position: the one before it must be known
            "async_scheduling": False,
            "worker_extension_cls": "trainer.rollout.vllm.engine.worker_extension.Extension",
            "seed": 0,
        }
        return {key: value for key, value in wanted.items() if value is not None}

    def _executor(self) -> str:
        if self.tensor_parallel_size == 1:
            return "uni"
        return "mp" if self.ranks_timeout_s is None else "external_launcher"


def options(
    rollout: Rollout, shape: ModelShape, dtype: torch.dtype, world: World, *, local_ranks: int = 1
) -> Options:
    """From the config. Raises :class:`UserError` for a setting that vLLM can't work with, naming
    the key.
    """
    engine = f"{KEY}.name={rollout.name}"
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"{engine}: vLLM is not installed here. Type make vllm (on a CPU; the image has the "
            "CUDA build), or set "
            f"{KEY}.name=hf"
        )
    on_cpu = world.device.type == "cpu"
    length = rollout.prompt_length + rollout.response_length
    _check_parallel(rollout, shape, world, local_ranks=local_ranks)
    budget = _budget(rollout, length, world)
    if on_cpu and shape.head_size not in CPU_HEADS:
        sizes = ", ".join(map(str, CPU_HEADS))
        raise UserError(
            f"{engine}: the model's heads have {shape.head_size} features; vLLM's attention on a "
            f"CPU takes {sizes}. "
            f"Set {KEY}.name=hf"
        )
    cache = _cache(rollout, shape, dtype, length) if on_cpu else None
    owners = rollout.server.replicas if rollout.name == "vllm_server" else local_ranks
    return Options(
        max_model_len=length,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=budget,
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        chunked_prefill=rollout.enable_chunked_prefill,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        cache_bytes=None if cache is None or rollout.nnodes else cache_bytes(cache, owners),
        dtype=DTYPES[dtype],
        on_cpu=on_cpu,
        cache=cache,
        ranks_timeout_s=math.ceil(patience(world).total_seconds())
        if len(_sharing(rollout, world)) > 1
        else None,
    )


def _budget(rollout: Rollout, length: int, world: World) -> int | None:
    asked = rollout.max_num_batched_tokens
    if asked == "auto":
        return None
    budget = (
        min(asked[rank % len(asked)] for rank in _sharing(rollout, world))
        if isinstance(asked, list)
        else asked
    )
    key = f"{KEY}.max_num_batched_tokens={budget}"
    if not rollout.enable_chunked_prefill and budget < length:
        raise UserError(
            f"{key} is below the longest prompt and response, {length} tokens ({KEY}.prompt_length "
            "+ response_length), "
            f"which vLLM without chunks takes whole: raise it to {length}, or set "
            f"{KEY}.enable_chunked_prefill=true"
        )
    if budget < rollout.max_num_seqs:
        raise UserError(
            f"{key} is below {KEY}.max_num_seqs={rollout.max_num_seqs}, and every sequence takes a "
            "token of each step: "
            f"raise it, or lower max_num_seqs to {budget}"
        )
    return budget


def _sharing(rollout: Rollout, world: World) -> range:
    """Ranks that have their engine together with this one."""
    size = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    first = world.rank // size * size
    return range(first, first + size)


def _check_parallel(rollout: Rollout, shape: ModelShape, world: World, *, local_ranks: int) -> None:
    size = rollout.tensor_model_parallel_size
    key = f"{KEY}.tensor_model_parallel_size={size}"
    if rollout.name == "vllm" and (local_ranks % size or world.size % size):
        raise UserError(
            f"{key}: an engine in the trainer's process is split over ranks of one node, and there "
            f"are {local_ranks}: "
            f"set it to a divisor of trainer.n_gpus_per_node, or {KEY}.name=vllm_server"
        )
    if shape.heads % size or (shape.kv_heads % size and size % shape.kv_heads):
        fits = [
            n
            for n in range(1, shape.heads + 1)
            if not shape.heads % n and not (shape.kv_heads % n and n % shape.kv_heads)
        ]
        raise UserError(
            f"{key}: the model's {shape.heads} heads and {shape.kv_heads} key/value heads can't be "
            "split so; "
            f"it takes {', '.join(map(str, fits))}"
        )


def _cache(rollout: Rollout, shape: ModelShape, dtype: torch.dtype, length: int) -> Cache:
    heads = max(1, shape.kv_heads // rollout.tensor_model_parallel_size)
    block = CPU_BLOCK * 2 * shape.layers * heads * shape.head_size * dtype.itemsize
    blocks = -(-length // CPU_BLOCK)
    return Cache(
        length=length,
        least=(blocks + 1) * block,
        wanted=(blocks * rollout.max_num_seqs + 1) * block,
        share=rollout.gpu_memory_utilization,
    )
