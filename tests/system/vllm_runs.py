"""Models, engines and comparisons for the tests that run vLLM."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.helpers import load, minimal_settings
from trainer.base import signals
from trainer.base.signals import StopRequested
from trainer.models import LoadedModel, load_model
from trainer.parallel.weights import whole_weights
from trainer.ranks.world import World
from trainer.rollout import FinishedGroup, Group, RolloutEngine, Sampling, eos_ids
from trainer.rollout.log_prob_check import trainer_log_probs
from trainer.rollout.vllm.engine.options import CPU_BLOCK_SIZE
from trainer.rollout.vllm.make import make_vllm_engine

MAX_PROBS_DIFF = 2e-5
"""Between rollout and trainer. Their kernels differ by up to 3e-6, on some processors by less than
1e-6; weights that are one step old differ by 2e-4.
"""
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm"
)
PROMPT = 48
RESPONSE = 24


def tiny() -> LoadedModel:
    """``builtin:tiny`` with sharper logits: rounding doesn't change the likeliest token."""
    loaded = load_model("builtin:tiny", dtype=torch.float32, device="cpu")
    with torch.no_grad():
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
    """Start an engine and give it the model's weights as version 1.

    ``changes`` are keys of ``actor_rollout_ref.rollout``; ``blocks`` limits the key-value cache.
    """
    rollout = load(minimal_settings()).actor_rollout_ref.rollout
    base = {
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "gpu_memory_utilization": 0.3,
        "timeout_s": 300.0,
        "max_restarts": 1,
    }
    single_rank = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), cpu_group=None)  # type: ignore[arg-type]
    rollout = rollout.model_copy(update=base | changes)
    ends = eos_ids(loaded.model, loaded.tokenizer)
    engine: Any = make_vllm_engine(rollout, loaded, world or single_rank, run_dir, eos_ids=ends)
    if blocks is not None:
        shape = loaded.shape
        token = 2 * shape.layers * shape.kv_heads * shape.head_size * 4
        kv_cache_bytes = blocks * CPU_BLOCK_SIZE * token
        engine.options = dataclasses.replace(engine.options, kv_cache_bytes=kv_cache_bytes)
    engine.start()
    sync(engine, loaded, 1)
    return engine


def sync(engine: RolloutEngine, loaded: LoadedModel, version: int) -> None:
    engine.update_weights(whole_weights(loaded.model, sharded=False), version)


def prompts(count: int = 5, n: int = 4) -> list[Group]:
    """Prompts of several lengths, one longer than a block of the cache."""
    tokens = torch.randint(
        5, 500, (count, PROMPT), generator=torch.Generator().manual_seed(0)
    ).tolist()
    return [
        Group(prompt_ids=ids[: PROMPT - 11 * k], sample_ids=range(n * k, n * (k + 1)), step=3)
        for k, ids in enumerate(tokens[:5])
    ]


def largest_difference(
    loaded: LoadedModel,
    groups: Sequence[Group],
    finished: Sequence[FinishedGroup],
    *,
    temperature: float,
) -> float:
    """Return the largest difference between the samples' log-probs and the trainer's, nats."""
    largest = 0.0
    for group in finished:
        for sample in group.samples:
            prompt = list(groups[group.number].prompt_ids)
            expected = trainer_log_probs(
                loaded.model, prompt, sample.response_ids, temperature=temperature
            )
            largest = max(largest, float((expected - sample.log_probs).abs().max()))
    return largest


def ids(finished: Sequence[FinishedGroup]) -> dict[int, list[list[int]]]:
    """Return the tokens by group; no group may come twice."""
    assert len({f.number for f in finished}) == len(finished)
    return {f.number: [s.response_ids.tolist() for s in f.samples] for f in finished}


def assert_equal_until_a_near_tie(
    loaded: LoadedModel,
    groups: Sequence[Group],
    one: Sequence[FinishedGroup],
    other: Sequence[FinishedGroup],
    *,
    tie: float = 1e-3,
) -> None:
    """Greedy samples of two engines are equal up to the first token where two are almost equally
    likely (``tie``, nats): kernels of other processors round otherwise.
    """
    expected = ids(other)
    for number, samples in ids(one).items():
        for tokens, theirs in zip(samples, expected[number], strict=True):
            if tokens == theirs:
                continue
            pairs = zip(tokens, theirs, strict=False)
            first = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
            assert first is not None, "one sample is the beginning of the other"
            prompt = list(groups[number].prompt_ids)
            likelihood = [
                float(
                    trainer_log_probs(
                        loaded.model, prompt, torch.tensor([*tokens[:first], last]), temperature=1.0
                    )[-1]
                )
                for last in (tokens[first], theirs[first])
            ]
            assert abs(likelihood[0] - likelihood[1]) < tie, (number, first, likelihood)


def perturb(loaded: LoadedModel) -> None:
    """Change all weights, as an optimizer step would."""
    with torch.no_grad():
        for k, parameter in enumerate(loaded.model.parameters()):
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(k))
            parameter.add_(noise, alpha=0.02)


def assert_stops(
    engine: RolloutEngine,
    groups: Sequence[Group],
    sampling: Sampling,
    *,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stop that is requested while ``engine`` generates is heard at once; all groups that were
    not handed out come back.
    """
    generation = engine.generate(groups, sampling, seed=seed)
    monkeypatch.setattr(signals._request, "cause", "USR2")
    began = time.monotonic()
    finished: list[FinishedGroup] = []
    with pytest.raises(StopRequested):
        for group in generation:
            finished.append(group)
            assert len(finished) < len(groups)
    left = generation.stop()
    assert time.monotonic() - began < 30
    monkeypatch.setattr(signals._request, "cause", None)
    numbers = [group.number for group in [*finished, *left]]
    assert sorted(numbers) == list(range(len(groups)))
