"""What a node has for engines: cores, GPUs and memory. Judged on the node itself."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil
import torch

from trainer.base.environment import available_cores
from trainer.base.errors import UserError
from trainer.rollout.settings import KEY

CPU_CACHE_SHARE = 0.25
"""Of the free memory, times ``gpu_memory_utilization``: the most that the caches of one machine's
engines take.
"""


SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's own variable for the cache of an engine on a CPU, whole GiB."""


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values of one shard on a CPU."""

    length: int
    """Longest sequence, tokens."""
    least: int
    """Bytes for one of them."""
    wanted: int
    """Bytes for as many as are drawn at once."""
    share: float
    """``gpu_memory_utilization``."""


def cache_bytes(cache: Cache, owners: int) -> int:
    """What each of ``owners`` on this machine gets. Raises :class:`UserError` when no sequence fits
    in that.
    """
    if space := os.environ.get(SPACE):
        if not space.isdecimal() or int(space) == 0:
            raise UserError(
                f"the environment variable {SPACE}={space} is no number of whole GiB: set it to 1 "
                "or more"
            )
        return int(space) << 30
    spare = psutil.virtual_memory().available * CPU_CACHE_SHARE * cache.share / owners
    if spare < cache.least:
        raise UserError(
            f"{KEY}: one sequence of {cache.length} tokens needs {_mib(cache.least)} of cache, and "
            "there "
            f"are {_mib(spare)} for it: lower data.max_response_length, raise "
            f"{KEY}.gpu_memory_utilization, or "
            f"set {SPACE} to whole GiB"
        )
    return int(min(cache.wanted, spare))


def server_environments(
    replicas: int, size: int, *, on_cpu: bool, training: int
) -> list[dict[str, str]]:
    """For each replica on this node, split over ``size``, the variables that give it a place:
    cores, or GPUs beside the first ``training`` ones, on which ranks train.

    Raises :class:`UserError` when there are not enough GPUs.
    """
    if on_cpu:
        threads = max(1, available_cores() // (replicas * size))
        return [{"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}] * replicas
    gpus = torch.cuda.device_count()
    if training + replicas * size > gpus:
        asked = f"{KEY}.server.replicas={replicas} x {KEY}.tensor_model_parallel_size={size} GPUs of servers"
        if not training:
            raise UserError(
                f"{asked} are more than the {gpus} of a node: lower one of them or raise "
                f"{KEY}.nnodes"
            )
        raise UserError(
            f"{asked} and {training} that train are more than the {gpus} of this node: lower one "
            "of them or "
            f"trainer.n_gpus_per_node, or set {KEY}.name=vllm, which shares the trainer's GPUs"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    first = [training + number * size for number in range(replicas)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(visible[f : f + size])} for f in first]


def _mib(size: float) -> str:
    return f"{size / 2**20:,.2f} MiB"
