"""Advantages of whole responses from the rewards of their group: float32 [sequences].

``scores`` [sequences], ``groups`` int64 [sequences]: equal for the responses of one prompt. A group
of one has no baseline and keeps its score: that is plain REINFORCE, unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.ragged import group_index, segment_count, segment_sum

EPSILON = 1e-6
"""Added to the standard deviation of a group of rewards, which are of order 1."""


def grpo(scores: Tensor, groups: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """(score - mean of its group) / (standard deviation of its group + 1e-6).

    arXiv 2402.03300, section 4.1, with the unbiased deviation; ``norm_by_std=False`` is Dr.GRPO
    (arXiv 2503.20783).
    """
    x = scores.double()
    index, n_groups = group_index(groups)
    count = segment_count(index, n_groups)
    mean = segment_sum(x, index, n_groups) / count
    centred = x - mean[index]
    if norm_by_std:
        centred = centred / (_deviation(x, index, n_groups)[index] + EPSILON)
    return torch.where(count[index] > 1, centred, x).float()


def grpo_passk(scores: Tensor, groups: Tensor, *, norm_by_std: bool = True) -> Tensor:
    """Best minus second best score for the best response of a group, 0 for the others.

    That is the leave-one-out baseline of the objective max(scores), pass@k of a right-or-wrong
    reward (arXiv 2503.19595, section 3.2), divided by the deviation of the group as in
    :func:`grpo`. Equal best scores teach nothing.
    """
    x = scores.double()
    index, n_groups = group_index(groups)
    count = segment_count(index, n_groups)[index]
    # By group, best first: the first of a group and the one behind it are its two best.
    order = x.argsort(descending=True, stable=True)
    order = order[index[order].argsort(stable=True)]
    is_best = torch.ones_like(order, dtype=torch.bool)
    is_best[1:] = index[order[1:]] != index[order[:-1]]
    second = torch.roll(x[order], -1)
    best = order[is_best]
    out = torch.zeros_like(x)
    out[best] = x[best] - second[is_best]
    if norm_by_std:
        out = out / (_deviation(x, index, n_groups)[index] + EPSILON)
    return torch.where(count > 1, out, x).float()


def rloo(scores: Tensor, groups: Tensor) -> Tensor:
    """Score minus the mean of the *other* scores of its group (arXiv 2402.14740, equation 4)."""
    x = scores.double()
    index, n_groups = group_index(groups)
    count = segment_count(index, n_groups)[index]
    others = (segment_sum(x, index, n_groups)[index] - x) / (count - 1).clamp(min=1)
    return torch.where(count > 1, x - others, x).float()


def opo(scores: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """Score minus the mean score of its group weighted by length (OPO, arXiv 2505.23585, equation
    9), the baseline of least variance when the gradients of tokens are alike and independent.

    ``lengths`` int64 [sequences]: trained tokens. A group without any has the baseline 0.
    """
    x = scores.double()
    index, n_groups = group_index(groups)
    count = segment_count(index, n_groups)[index]
    total = segment_sum(lengths.double(), index, n_groups)
    baseline = segment_sum(x * lengths, index, n_groups) / total.clamp(min=1)
    return torch.where(count > 1, x - baseline[index], x).float()


def _deviation(x: Tensor, index: Tensor, n_groups: int) -> Tensor:
    """Unbiased standard deviation of each group: float64 [groups]; 0 for a group of one."""
    count = segment_count(index, n_groups)
    mean = segment_sum(x, index, n_groups) / count
    squares = segment_sum((x - mean[index]).square(), index, n_groups)
    return (squares / (count - 1).clamp(min=1)).sqrt()
