"""A model's weights one after another, whole, and never all of them at once where they are
sharded.
"""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
from torch import Tensor, nn

from trainer.models.lora import Weight, weights

BUCKET_BYTES = 256 << 20
"""Bytes gathered at a time under ZeRO-3: far above what a link needs for its full speed, far below
a model.
"""


def whole_weights(
    module: nn.Module, *, sharded: bool, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole tensor, without gradient, of each parameter.

    Names are those of ``named_parameters``, tied weights once. A model with adapters yields the
    weights of the merged model, under the names of a model without adapters.

    A tensor is the module's own, or made from it and an adapter, or gathered under ZeRO-3
    (``sharded``): read it before the next one is requested. Under ZeRO-3 every rank has to iterate
    to the end. At most ``bucket_bytes`` are gathered at a time, or one weight where that is larger.
    """
    if not sharded:
        for weight in weights(module):
            yield weight.name, weight.merged()
        return
    for bucket in _buckets(module, bucket_bytes):
        parameters = [parameter for weight in bucket for parameter in weight.parameters]
        with deepspeed.zero.GatheredParameters(parameters):
            for weight in bucket:
                yield weight.name, weight.merged()


def _buckets(module: nn.Module, max_bytes: int) -> Iterator[list[Weight]]:
    bucket: list[Weight] = []
    bucket_bytes = 0
    for weight in weights(module):
        nbytes = _whole_bytes(weight)
        if bucket and bucket_bytes + nbytes > max_bytes:
            yield bucket
            bucket = []
            bucket_bytes = 0
        bucket.append(weight)
        bucket_bytes += nbytes
    if bucket:
        yield bucket


def _whole_bytes(weight: Weight) -> int:
    """Bytes of the parameters of ``weight``, all shards together."""
    return sum(int(getattr(p, "ds_numel", p.numel())) * p.element_size() for p in weight.parameters)
