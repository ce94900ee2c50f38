"""Drawing with the hf engine in one line."""

from __future__ import annotations

from torch import nn

from trainer.rollout import Group, Sample, Sampling
from trainer.rollout.hf import HfEngine

PROMPTS = [[5, 9, 3], [7], [4, 4, 8, 2, 60, 3, 9], [5, 9, 3], [11, 12], [5, 9, 3], [33, 4, 5, 6]]


def engine(model: nn.Module, eos: list[int] | None = None, max_num_seqs: int = 64) -> HfEngine:
    return HfEngine(model, eos_ids=eos or [1], max_num_seqs=max_num_seqs)


def sampling(**how: object) -> Sampling:
    return Sampling(**{"max_response_length": 12, **how})  # type: ignore[arg-type]


def drawn(
    model: nn.Module,
    prompts: list[list[int]] = PROMPTS,
    sample_ids: list[int] | None = None,
    *,
    step: int = 3,
    seed: int = 17,
    eos: list[int] | None = None,
    max_num_seqs: int = 64,
    **how: object,
) -> list[Sample]:
    """One sample of each prompt, in their order."""
    names = sample_ids or list(range(len(prompts)))
    groups = [
        Group(prompt_ids=p, sample_ids=[i], step=step) for p, i in zip(prompts, names, strict=True)
    ]
    finished = engine(model, eos, max_num_seqs).generate(groups, sampling(**how), seed=seed)
    found = {f.number: f.samples[0] for f in finished}
    return [found[i] for i in range(len(prompts))]


def ids(samples: list[Sample]) -> list[list[int]]:
    return [s.response_ids.tolist() for s in samples]
