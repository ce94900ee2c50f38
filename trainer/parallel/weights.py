"""A model's weights one after another, whole, never all of them at once where they are sharded."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
from torch import Tensor, nn

BUCKET_BYTES = 256 << 20
"""Gathered at a time under ZeRO-3: far above what a link needs for its full speed, far below a model."""


def whole_weights(
    module: nn.Module, *, sharded: bool, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Name (as in ``named_parameters``: tied weights once) and whole tensor, without gradient, of each parameter.

    A tensor is the module's own, or under ZeRO-3 (``sharded``) gathered: read it before the next one is asked for.
    There every rank has to iterate, to the end. At most ``bucket_bytes`` are gathered at a time, or one parameter
    where that is larger.
    """
    if not sharded:
        for name, parameter in module.named_parameters():
            yield name, parameter.detach()
        return
    for bucket in _buckets(module, bucket_bytes):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            for name, parameter in bucket:
                yield name, parameter.detach()


def _buckets(module: nn.Module, limit: int) -> Iterator[list[tuple[str, nn.Parameter]]]:
    bucket: list[tuple[str, nn.Parameter]] = []
    held = 0
    for name, parameter in module.named_parameters():
        nbytes = int(getattr(parameter, "ds_numel", parameter.numel())) * parameter.element_size()
        if bucket and held + nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, parameter))
        held += nbytes
    if bucket:
        yield bucket
