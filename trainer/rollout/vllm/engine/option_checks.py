"""Checks of engine settings, made before vLLM is loaded."""

from __future__ import annotations

import importlib.util

from trainer.base.errors import UserError
from trainer.base.model_shape import ModelShape
from trainer.config.schema import Rollout
from trainer.ranks.world import World
from trainer.rollout.settings import KEY

CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head sizes that vLLM's attention on a CPU is built for."""


def check_supported(rollout: Rollout, shape: ModelShape, *, on_cpu: bool) -> None:
    """Raise :class:`UserError` when vLLM is missing, or can't run the model's heads on a CPU."""
    engine = f"{KEY}.name={rollout.name}"
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"{engine}: vLLM is not installed here. Type make vllm (on a CPU; the image has the "
            f"CUDA build), or set {KEY}.name=hf"
        )
    if on_cpu and shape.head_size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise UserError(
            f"{engine}: the model's heads have {shape.head_size} features; vLLM's attention on a "
            f"CPU takes {sizes}. Set {KEY}.name=hf"
        )


def max_num_batched_tokens(rollout: Rollout, length: int, world: World) -> int | None:
    """Return the token budget of an engine step; the smallest of the ranks that share the engine.

    Raises :class:`UserError` for a budget that is too small. ``length``: longest sequence, tokens.
    """
    setting = rollout.max_num_batched_tokens
    if setting == "auto":
        return None
    budget: int
    if isinstance(setting, list):
        budget = min(setting[rank % len(setting)] for rank in ranks_of_engine(rollout, world))
    else:
        budget = setting
    key = f"{KEY}.max_num_batched_tokens={budget}"
    if not rollout.enable_chunked_prefill and budget < length:
        raise UserError(
            f"{key} is below the longest prompt and response, {length} tokens ({KEY}.prompt_length "
            f"+ response_length), which vLLM without chunks takes whole: raise it to {length}, or "
            f"set {KEY}.enable_chunked_prefill=true"
        )
    if budget < rollout.max_num_seqs:
        raise UserError(
            f"{key} is below {KEY}.max_num_seqs={rollout.max_num_seqs}, and every sequence takes a "
            f"token of each step: raise it, or lower max_num_seqs to {budget}"
        )
    return budget


def ranks_of_engine(rollout: Rollout, world: World) -> range:
    """Return the ranks that share this rank's engine."""
    size = rollout.tensor_model_parallel_size if rollout.name == "vllm" else 1
    first = world.rank // size * size
    return range(first, first + size)


def check_tensor_parallel(
    rollout: Rollout, shape: ModelShape, world: World, *, local_ranks: int
) -> None:
    """Raise :class:`UserError` when the model or the ranks can't be split by the size."""
    size = rollout.tensor_model_parallel_size
    key = f"{KEY}.tensor_model_parallel_size={size}"
    if rollout.name == "vllm" and (local_ranks % size or world.size % size):
        raise UserError(
            f"{key}: an engine in the trainer's process is split over ranks of one node, and there "
            f"are {local_ranks}: set it to a divisor of trainer.n_gpus_per_node, or "
            f"{KEY}.name=vllm_server"
        )
    if not _divides_heads(shape, size):
        sizes = [str(n) for n in range(1, shape.heads + 1) if _divides_heads(shape, n)]
        raise UserError(
            f"{key}: the model's {shape.heads} heads and {shape.kv_heads} key/value heads can't be "
            f"split so; it takes {', '.join(sizes)}"
        )


def _divides_heads(shape: ModelShape, size: int) -> bool:
    """Whether ``size`` shards get equally many heads; key/value heads may be replicated."""
    kv_heads_fit = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
    return shape.heads % size == 0 and kv_heads_fit
