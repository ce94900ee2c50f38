"""Shared by the tests that run vLLM itself."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.helpers import load, run_of
from trainer.models import LoadedModel, load_model
from trainer.parallel.weights import whole_weights
from trainer.ranks.world import World
from trainer.rollout import Finished, Group, RolloutEngine, eos_ids
from trainer.rollout.agreement import trainer_log_probs
from trainer.rollout.vllm.engine.options import CPU_BLOCK
from trainer.rollout.vllm.make import make_vllm_engine

NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm"
)
PROMPT, RESPONSE = 48, 24


def tiny() -> LoadedModel:
    loaded = load_model("builtin:tiny", dtype=torch.float32, device="cpu")
    with (
        torch.no_grad()
    ):  # sharper than a fresh model's: the likeliest token is no matter of rounding
        for parameter in loaded.model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3)
    return loaded


def engine_over(
    loaded: LoadedModel,
    run_dir: Path,
    *,
    world: World | None = None,
    blocks: int | None = None,
    **changes: Any,
) -> Any:
    """An engine of ``rollout.name``, started, with the model's weights as version 1. ``blocks``: of
    its cache.
    """
    rollout = load(run_of()).actor_rollout_ref.rollout
    base = {
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.3,
        "timeout_s": 300.0,
        "max_restarts": 1,
    }
    alone = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), cpu_group=None)  # type: ignore[arg-type]
    wanted = rollout.model_copy(update=base | changes)
    ends = eos_ids(loaded.model, loaded.tokenizer)
    engine = make_vllm_engine(wanted, loaded, world or alone, run_dir, eos_ids=ends)
    if blocks is not None:
        shape = loaded.shape
        token = 2 * shape.layers * shape.kv_heads * shape.head_size * 4
        engine.options = dataclasses.replace(engine.options, cache_bytes=blocks * CPU_BLOCK * token)  # type: ignore[attr-defined]
    engine.start()
    sync(engine, loaded, 1)
    return engine


def sync(engine: RolloutEngine, loaded: LoadedModel, version: int) -> None:
    engine.update_weights(whole_weights(loaded.model, sharded=False), version)


def prompts(count: int = 5, n: int = 4) -> list[Group]:
    """Prompts of several lengths, one longer than a block of the cache."""
    made = torch.randint(
        5, 500, (count, PROMPT), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return [
        Group(prompt_ids=ids[: PROMPT - 11 * k], sample_ids=range(n * k, n * (k + 1)), step=3)
        for k, ids in enumerate(made[:5])
    ]


def worst(
    loaded: LoadedModel,
    groups: Sequence[Group],
    finished: Sequence[Finished],
    *,
    temperature: float,
) -> float:
    """Largest difference between the log-probs of samples and the trainer's, nats."""
    found = 0.0
    for group in finished:
        for sample in group.samples:
            prompt = list(groups[group.number].prompt_ids)
            wanted = trainer_log_probs(
                loaded.model, prompt, sample.response_ids, temperature=temperature
            )
            found = max(found, float((wanted - sample.log_probs).abs().max()))
    return found


def ids(finished: Sequence[Finished]) -> dict[int, list[list[int]]]:
    """Tokens by group; no group may come twice."""
    assert len({f.number for f in finished}) == len(finished)
    return {f.number: [s.response_ids.tolist() for s in f.samples] for f in finished}


def change(loaded: LoadedModel) -> None:
    """As an optimizer step would."""
    with torch.no_grad():
        for k, parameter in enumerate(loaded.model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k))
            parameter.add_(noise, alpha=0.02)
