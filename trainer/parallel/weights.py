"""A model's weights one after another, whole, never all of them at once where they are sharded."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
from torch import Tensor, nn

from trainer.models.lora import Weight, weights

BUCKET_BYTES = 256 << 20
"""Gathered at a time under ZeRO-3: far above what a link needs for its full speed, far below a
model.
"""


def whole_weights(
    module: nn.Module, *, sharded: bool, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Name (as in ``named_parameters``: tied weights once) and whole tensor, without gradient, of
    each parameter. Of a model with adapters: of the model that they make when they are merged,
    which has the names of the one without.

    A tensor is the module's own, made of it and an adapter, or under ZeRO-3 (``sharded``) gathered:
    read it before the next one is asked for. There every rank has to iterate, to the end. At most
    ``bucket_bytes`` are gathered at a time, or one weight where that is larger.
    """
    if not sharded:
        for weight in weights(module):
            yield weight.name, weight.merged()
        return
    for bucket in _buckets(module, bucket_bytes):
        with deepspeed.zero.GatheredParameters(
            [parameter for weight in bucket for parameter in weight.parameters]
        ):
            for weight in bucket:
                yield weight.name, weight.merged()


def _buckets(module: nn.Module, limit: int) -> Iterator[list[Weight]]:
    bucket: list[Weight] = []
    held = 0
    for weight in weights(module):
        nbytes = sum(
            int(getattr(p, "ds_numel", p.numel())) * p.element_size() for p in weight.parameters
        )
        if bucket and held + nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(weight)
        held += nbytes
    if bucket:
        yield bucket
