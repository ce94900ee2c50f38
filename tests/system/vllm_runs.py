"""Models, engines and comparisons for the tests that run vLLM."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.config.helpers import load, minimal_settings
from trainer.base import signals
from trainer.base.signals import StopRequested
from trainer.data import Batch
from trainer.models import LoadedModel, load_model, pack, token_stats
from trainer.parallel.weights import whole_weights
from trainer.ranks.world import World
from trainer.rollout import FinishedGroup, Group, RolloutEngine, Sampling, eos_ids
from trainer.rollout.hf.sampling import invert_cdf, truncate, uniforms
from trainer.rollout.log_prob_check import trainer_log_probs
from trainer.rollout.vllm.engine.options import CPU_BLOCK_SIZE
from trainer.rollout.vllm.make import make_vllm_engine

MAX_PROBS_DIFF = 2e-5
"""Between rollout and trainer. Their kernels differ by up to 3e-6, on some processors by less than
1e-6; weights that are one step old differ by 2e-4.
"""
TIE = 2e-4
"""How far the kernels of two engines may move log-probs, nats, or a distribution function."""
NEEDS_VLLM = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make vllm"
)
PROMPT = 48
RESPONSE = 24


def tiny() -> LoadedModel:
    """``builtin:tiny`` with sharper logits, so that few tokens are nearly as likely as others."""
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


def assert_same_draws(
    loaded: LoadedModel,
    groups: Sequence[Group],
    one: Mapping[int, list[list[int]]],
    other: Mapping[int, list[list[int]]],
    sampling: Sampling,
    *,
    seed: int,
) -> None:
    """Samples (:func:`ids`) of two engines, or of batches of other shapes, are equal up to the
    first near-tie, which few have: a token that the trainer's own distribution gives as well when
    it is moved by ``TIE``. Kernels round otherwise on other processors and for other shapes.
    """
    differing = 0
    assert one.keys() == other.keys()
    for number, samples in one.items():
        group = groups[number]
        for tokens, theirs, sample_id in zip(samples, other[number], group.sample_ids, strict=True):
            if tokens == theirs:
                continue
            differing += 1
            pairs = zip(tokens, theirs, strict=False)
            first = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
            assert first is not None, "one sample is the beginning of the other"
            scores = _distribution(loaded, [*group.prompt_ids, *tokens[:first]], sampling)
            u = uniforms(seed, group.step, [sample_id], 0, first + 1)[0, first]
            possible = _possible_tokens(scores, float(u), sampling)
            assert {tokens[first], theirs[first]} <= possible, (number, sample_id, first)
    assert differing <= sum(map(len, other.values())) // 4, "too many to be near-ties"


def _distribution(loaded: LoadedModel, prefix: list[int], sampling: Sampling) -> torch.Tensor:
    """Log-probs of every next token under the trainer's model [vocabulary]."""
    vocabulary = loaded.shape.vocab
    mask = torch.arange(len(prefix) + 1) == len(prefix)
    sequences = [torch.tensor([*prefix, token]) for token in range(vocabulary)]
    batch = Batch.from_sequences({"input_ids": sequences, "loss_mask": [mask] * vocabulary})
    stats = token_stats(loaded.model, pack(batch), temperature=sampling.scale)
    return stats.log_probs.detach().cpu()


def _possible_tokens(scores: torch.Tensor, u: float, sampling: Sampling) -> set[int]:
    """The tokens that are drawn with the random number ``u`` when ``scores``, log-probs
    [vocabulary], move by ``TIE``.
    """
    if sampling.greedy:
        return set((scores > scores.max() - TIE).nonzero().flatten().tolist())
    cuts = [sampling]
    if sampling.top_p < 1:
        cuts += [dataclasses.replace(sampling, top_p=sampling.top_p + d) for d in (-TIE, TIE)]
    if sampling.top_k > 0:
        ranked = scores.sort(descending=True).values
        near = (ranked - ranked[sampling.top_k - 1]).abs() < TIE
        sizes = {int(k) for k in near.nonzero().flatten()} | {int(k) + 1 for k in near.nonzero()}
        cuts += [dataclasses.replace(cut, top_k=max(1, k)) for cut in cuts for k in sizes]
    moved = torch.tensor([u - TIE, u, u + TIE], dtype=torch.float64).clamp(0, 1 - 2**-40)
    possible: set[int] = set()
    for cut in cuts:
        rows = truncate(scores.repeat(3, 1), cut.top_k, cut.top_p)
        possible |= set(invert_cdf(rows, moved)[0].tolist())
    return possible


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
