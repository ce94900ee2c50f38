"""A key-value cache with room to grow: a decoding step writes in place instead of copying all that stands before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

GROW = 64
"""Least columns added when the cache is full."""


class SlabLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, kv_heads, capacity, head_dim] of one layer, filled up to column ``length``."""

    def __init__(self, keys: Tensor, values: Tensor, length: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.slab_keys, self.slab_values, self.length = keys, values, length
        self.is_initialized = True
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write behind the last column; what transformers' attention calls."""
        end = self.length + key_states.shape[2]
        if end > self.slab_keys.shape[2]:
            room = max(GROW, self.slab_keys.shape[2] // 2, end - self.slab_keys.shape[2])
            self.slab_keys, self.slab_values = _wider(self.slab_keys, room), _wider(self.slab_values, room)
        self.slab_keys[:, :, self.length : end] = key_states
        self.slab_values[:, :, self.length : end] = value_states
        self.length = end
        self._show()
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Columns filled."""
        return self.length

    def keep(self, rows: Tensor, first_column: int) -> None:
        """Forget all rows but ``rows`` int64 [kept] and the columns before ``first_column``."""
        self.slab_keys = self.slab_keys[:, :, first_column:][rows]
        self.slab_values = self.slab_values[:, :, first_column:][rows]
        self.length -= first_column
        self._show()

    def _show(self) -> None:
        self.keys, self.values = self.slab_keys[:, :, : self.length], self.slab_values[:, :, : self.length]


class SlabCache(DynamicCache):  # type: ignore[misc]
    """The layers of a batch of sequences that are filled to the same column, shorter prompts with pads on the left."""

    def __init__(self, filled: list[tuple[DynamicCache, Tensor]], rows: int, width: int, room: int) -> None:
        """Take over prefilled caches: each with int64 [rows of the slab], the place each of its rows is copied to.

        ``filled``: pairs (cache, (source row, target row) int64 [2, copies]). ``width``: columns of the longest prompt.
        """
        super().__init__()
        self.layers = []
        for number, layer in enumerate(filled[0][0].layers):
            shape = (rows, layer.keys.shape[1], width + room)
            keys = layer.keys.new_zeros(*shape, layer.keys.shape[3])
            values = layer.values.new_zeros(*shape, layer.values.shape[3])
            for cache, (source, target) in filled:
                part = cache.layers[number]
                first = width - part.keys.shape[2]
                keys[target, :, first:width] = part.keys[source]
                values[target, :, first:width] = part.values[source]
            self.layers.append(SlabLayer(keys, values, width))

    def keep(self, rows: Tensor, first_column: int) -> None:
        """See :meth:`SlabLayer.keep`."""
        for layer in self.layers:
            layer.keep(rows, first_column)


def _wider(slab: Tensor, room: int) -> Tensor:
    return torch.cat([slab, slab.new_zeros(*slab.shape[:2], room, slab.shape[3])], dim=2)
