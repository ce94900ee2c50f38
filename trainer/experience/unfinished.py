"""Unfinished responses exchanged between ranks, so that every rank knows the prompts left over."""

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
    samples: Mapping[int, Sequence[Sample]], n: int, world: World
) -> dict[int, list[Sample]]:
    """The ``n`` samples of each prompt in ``samples`` (by index in the step) of all ranks.

    The same on every rank; one exchange, as tensors. Collective.
    """
    batch = gather(_to_batch(samples, n), world)
    shared: dict[int, list[Sample]] = {}
    bounds = batch.cu_seqlens.tolist()
    for i, sample_id in enumerate(batch.rows["ids"].tolist()):
        tokens = slice(bounds[i], bounds[i + 1])
        mask = batch.columns["response_mask"][tokens]
        sample = Sample(
            response_ids=batch.columns["response_ids"][tokens].clone(),
            log_probs=batch.columns["log_probs"][tokens].clone(),
            finish_reason=REASONS[int(batch.rows["reasons"][i])],
            version=int(batch.rows["versions"][i]),
            response_mask=None if bool(mask.all()) else mask.clone(),
        )
        shared.setdefault(sample_id // n, []).append(sample)
    return shared


def _to_batch(samples: Mapping[int, Sequence[Sample]], n: int) -> Batch:
    """The samples as a ragged batch, whose row ``ids`` is prompt index * ``n`` + sample index."""
    empty = torch.zeros(0, dtype=torch.int64)  # a rank without samples has columns of these types
    ids: list[int] = []
    lengths = [0]
    reasons: list[int] = []
    versions: list[int] = []
    response_ids = [empty]
    log_probs = [empty.float()]
    masks = [empty.bool()]
    for index, group in samples.items():
        for k, sample in enumerate(group):
            ids.append(index * n + k)
            lengths.append(len(sample.response_ids))
            reasons.append(REASONS.index(sample.finish_reason))
            versions.append(sample.version)
            response_ids.append(sample.response_ids)
            log_probs.append(sample.log_probs)
            masks.append(sample.mask())
    return Batch(
        torch.tensor(lengths, dtype=torch.int64).cumsum(0),
        {
            "response_ids": torch.cat(response_ids),
            "log_probs": torch.cat(log_probs),
            "response_mask": torch.cat(masks),
        },
        {
            "ids": torch.tensor(ids, dtype=torch.int64),
            "reasons": torch.tensor(reasons, dtype=torch.int64),
            "versions": torch.tensor(versions, dtype=torch.int64),
        },
    )
