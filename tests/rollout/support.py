"""Samples of the hf engine in one line."""

from __future__ import annotations

from torch import nn

from trainer.rollout import Group, Sample, Sampling
from trainer.rollout.hf import HfEngine

PROMPTS = [[5, 9, 3], [7], [4, 4, 8, 2, 60, 3, 9], [5, 9, 3], [11, 12], [5, 9, 3], [33, 4, 5, 6]]


def engine(model: nn.Module, eos: list[int] | None = None, max_num_seqs: int = 64) -> HfEngine:
    return HfEngine(model, eos_ids=eos or [1], max_num_seqs=max_num_seqs)


def sampling(**settings: object) -> Sampling:
    return Sampling(**{"max_response_length": 12, **settings})  # type: ignore[arg-type]


def generate_samples(
    model: nn.Module,
    prompts: list[list[int]] = PROMPTS,
    sample_ids: list[int] | None = None,
    *,
    step: int = 3,
    seed: int = 17,
    eos: list[int] | None = None,
    max_num_seqs: int = 64,
    **settings: object,
) -> list[Sample]:
    """One sample per prompt, in their order."""
    all_ids = sample_ids or list(range(len(prompts)))
    groups = [
        Group(prompt_ids=p, sample_ids=[i], step=step)
        for p, i in zip(prompts, all_ids, strict=True)
    ]
    finished = engine(model, eos, max_num_seqs).generate(groups, sampling(**settings), seed=seed)
    samples = {group.number: group.samples[0] for group in finished}
    return [samples[i] for i in range(len(prompts))]


def ids(samples: list[Sample]) -> list[list[int]]:
    return [s.response_ids.tolist() for s in samples]
