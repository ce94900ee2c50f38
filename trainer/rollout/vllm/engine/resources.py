"""What a node has for engines: cores, GPUs and memory. Judged on the node itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from trainer.base.environment import available_cores
from trainer.base.errors import UserError
from trainer.base.memory import free_host_bytes
from trainer.rollout.settings import KEY

CPU_CACHE_SHARE = 0.25
"""The key-value caches of one machine's engines take at most this share of the free memory, times
``gpu_memory_utilization``.
"""
CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's own variable for the key-value cache of an engine on a CPU, whole GiB."""


@dataclass(frozen=True, kw_only=True)
class KvCacheDemand:
    """How much key-value cache one shard of an engine on a CPU can use."""

    max_model_len: int
    """Longest sequence, tokens."""
    min_bytes: int
    """Enough for one such sequence."""
    max_bytes: int
    """Enough for ``max_num_seqs`` of them."""
    memory_share: float
    """``gpu_memory_utilization``."""


def kv_cache_bytes(demand: KvCacheDemand, engines: int) -> int:
    """Return the bytes that each of ``engines`` on this machine gets for its cache.

    Raises :class:`UserError` when no sequence fits in that, or ``VLLM_CPU_KVCACHE_SPACE`` is
    unreadable.
    """
    space = os.environ.get(CACHE_VARIABLE)
    if space:
        if not space.isdecimal() or int(space) == 0:
            raise UserError(
                f"the environment variable {CACHE_VARIABLE}={space} is no number of whole GiB: set "
                "it to 1 or more"
            )
        return int(space) << 30
    free = free_host_bytes()
    available = free * CPU_CACHE_SHARE * demand.memory_share / engines
    if available < demand.min_bytes:
        raise UserError(
            f"{KEY}: one sequence of {demand.max_model_len} tokens needs {_mib(demand.min_bytes)} "
            f"of cache, and there are {_mib(available)} for it: lower data.max_response_length, "
            f"raise {KEY}.gpu_memory_utilization, or set {CACHE_VARIABLE} to whole GiB"
        )
    return int(min(demand.max_bytes, available))


def server_environments(
    replicas: int, tensor_parallel_size: int, *, on_cpu: bool, training_gpus: int
) -> list[dict[str, str]]:
    """Return for each replica on this node the variables that assign it cores or GPUs.

    Servers take the GPUs after the first ``training_gpus``, which the ranks of this node use.

    Raises :class:`UserError` when there are not enough GPUs.
    """
    if on_cpu:
        threads = max(1, available_cores() // (replicas * tensor_parallel_size))
        return [{"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}] * replicas
    gpus = torch.cuda.device_count()
    if training_gpus + replicas * tensor_parallel_size > gpus:
        demand = (
            f"{KEY}.server.replicas={replicas} x "
            f"{KEY}.tensor_model_parallel_size={tensor_parallel_size} GPUs of servers"
        )
        if not training_gpus:
            raise UserError(
                f"{demand} are more than the {gpus} of a node: lower one of them or raise "
                f"{KEY}.nnodes"
            )
        raise UserError(
            f"{demand} and {training_gpus} that train are more than the {gpus} of this node: "
            f"lower one of them or trainer.n_gpus_per_node, or set {KEY}.name=vllm, which shares "
            "the trainer's GPUs"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    environments = []
    for number in range(replicas):
        first = training_gpus + number * tensor_parallel_size
        devices = ",".join(visible[first : first + tensor_parallel_size])
        environments.append({"CUDA_VISIBLE_DEVICES": devices})
    return environments


def _mib(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB"
