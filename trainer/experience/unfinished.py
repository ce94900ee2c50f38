"""Unfinished responses between ranks: which prompt is left over is known to all, whoever began
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from trainer.data import Batch
from trainer.parallel.exchange import gather
from trainer.ranks.world import World
from trainer.rollout import FinishReason, Sample

REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


def share_samples(
    parts: Mapping[int, Sequence[Sample]], n: int, world: World
) -> dict[int, list[Sample]]:
    """The ``n`` samples of each prompt in ``parts`` of all ranks, by place in the step; the same on
    every rank.

    One exchange, as tensors. Every rank calls it.
    """
    batch = gather(_to_batch(parts, n), world)
    shared: dict[int, list[Sample]] = {}
    bounds = batch.cu_seqlens.tolist()
    for i, key in enumerate(batch.rows["ids"].tolist()):
        at = slice(bounds[i], bounds[i + 1])
        written = batch.columns["written"][at]
        sample = Sample(
            response_ids=batch.columns["response_ids"][at].clone(),
            log_probs=batch.columns["log_probs"][at].clone(),
            finish_reason=REASONS[int(batch.rows["reasons"][i])],
            version=int(batch.rows["versions"][i]),
            written=None if bool(written.all()) else written.clone(),
        )
        shared.setdefault(key // n, []).append(sample)
    return shared


def _to_batch(parts: Mapping[int, Sequence[Sample]], n: int) -> Batch:
    keyed = [(place * n + k, s) for place, samples in parts.items() for k, s in enumerate(samples)]
    samples = [s for _, s in keyed]
    masks = [
        torch.ones(len(s.response_ids), dtype=torch.bool) if s.written is None else s.written
        for s in samples
    ]
    lengths = torch.tensor([0, *(len(s.response_ids) for s in samples)], dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        lengths.cumsum(0),
        {
            "response_ids": torch.cat([none, *(s.response_ids for s in samples)]),
            "log_probs": torch.cat([none.float(), *(s.log_probs for s in samples)]),
            "written": torch.cat([none.bool(), *masks]),
        },
        {
            "ids": torch.tensor([key for key, _ in keyed], dtype=torch.int64),
            "reasons": torch.tensor(
                [REASONS.index(s.finish_reason) for s in samples], dtype=torch.int64
            ),
            "versions": torch.tensor([s.version for s in samples], dtype=torch.int64),
        },
    )
