"""Sums over the sequences of a ragged batch: flat values, and the sequence of each value."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_index(cu_seqlens: Tensor) -> Tensor:
    """The sequence of each token: int64 [tokens], from ``cu_seqlens`` int64 [sequences + 1]."""
    lengths = cu_seqlens.diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)


def segment_sum(values: Tensor, index: Tensor, segments: int) -> Tensor:
    """Sums of ``values`` [n] by ``index`` int64 [n]: [segments], in the dtype of ``values``."""
    return values.new_zeros(segments).index_add_(0, index, values)


def segment_count(index: Tensor, segments: int) -> Tensor:
    """How often each number below ``segments`` occurs in ``index`` int64 [n]: int64 [segments]."""
    return torch.bincount(index, minlength=segments)


def group_index(groups: Tensor) -> tuple[Tensor, int]:
    """Groups numbered from 0: int64 [sequences] from labels int64 [sequences], and their number."""
    labels, index = torch.unique(groups, return_inverse=True)
    return index, int(labels.numel())
