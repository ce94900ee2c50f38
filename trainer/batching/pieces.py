"""Pieces: what the planner moves as one. A sequence, or several sequences of one group around one
prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.loops import accelerated
from trainer.batching.loops.best_fit import cut
from trainer.batching.packing import ByCost
from trainer.batching.sequences import StepSequences

SINGLES_SHARE = 0.25
"""Share of the cost whose groups the mixed way of :func:`group_splits` splits into single
sequences.
"""


@dataclass(frozen=True)
class Pieces:
    """Pieces of a step. ``members[starts[p]:starts[p + 1]]`` are the sequences of piece p."""

    tokens: Ints
    """int64 [pieces]."""
    cost: Floats
    """float64 [pieces]."""
    buckets: Ints
    """int64 [pieces]."""
    members: Ints
    """int64 [sequences]: indices of sequences, piece by piece."""
    starts: Ints
    """int64 [pieces + 1]."""

    @cached_property
    def by_cost(self) -> ByCost:
        """Pieces by rising cost."""
        return ByCost.of(self.cost, self.tokens)

    @cached_property
    def mixed(self) -> bool:
        """Whether they are of more than one bucket."""
        return bool(self.buckets.size) and int(self.buckets.min()) != int(self.buckets.max())

    @cached_property
    def total_tokens(self) -> int:
        """Tokens of all pieces."""
        return int(self.tokens.sum())

    @cached_property
    def total_cost(self) -> float:
        """Cost of all pieces."""
        return float(self.cost.sum())

    @cached_property
    def piece_of(self) -> Ints:
        """int64 [sequences]: the piece that a sequence is part of."""
        out = np.empty(self.members.size, np.int64)
        out[self.members] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return out

    def __len__(self) -> int:
        return int(self.tokens.size)


def single_sequences(sequences: StepSequences, cost: CostModel) -> Pieces:
    """One piece per sequence."""
    lengths = sequences.lengths
    n = lengths.size
    return Pieces(lengths, cost(lengths), sequences.buckets, np.arange(n), np.arange(n + 1))


def cut_groups(sequences: StepSequences, cost: CostModel, longest: int | Ints, cap: int) -> Pieces:
    """Pieces of at most ``longest`` sequences of one group and bucket, none of more than ``cap``
    tokens.

    ``longest`` is one number, or one per group [groups]. Within a group sequences are taken longest
    first, so that the pieces of a group hold sequences of like length.
    """
    order, opens, own, prompts, groups, buckets = sequences.group_order
    if isinstance(longest, np.ndarray):
        limits = longest[groups]
    else:
        limits = np.full(own.size, longest)
    starts: Ints = accelerated(cut, int(own.size))(opens, own, prompts, limits, cap)
    if not starts.size:
        return Pieces(own, np.zeros(0), buckets, order, np.array([order.size]))
    tokens = np.add.reduceat(own, starts)
    weight = np.add.reduceat(sequences.own_costs(cost)[order], starts)
    if sequences.shared:
        tokens = tokens + prompts[starts]
        weight = weight + sequences.prompt_costs(cost)[order[starts]]
    return Pieces(tokens, weight, buckets[starts], order, np.append(starts, order.size))


def group_splits(sequences: StepSequences, cost: CostModel, cap: int) -> list[Pieces]:
    """Ways to split groups with shared prompts into pieces, coarse to fine.

    Whole groups save most, small pieces balance best, and the best is in between. One way splits
    only some groups, those whose prompts cost least to compute again, so that small pieces are at
    hand to balance the rest.
    """
    count = np.bincount(sequences.groups)
    largest = int(count.max())
    whole = cut_groups(sequences, cost, largest, cap)
    if largest == 1:
        return [whole]
    some = np.full(count.size, largest)
    some[_cheapest_to_split(sequences, cost, count)] = 1
    out = [whole, cut_groups(sequences, cost, some, cap)]
    size = largest // 2
    while size >= 2:
        out.append(cut_groups(sequences, cost, size, cap))
        size //= 2
    return [*out, single_sequences(sequences, cost)]


def _cheapest_to_split(sequences: StepSequences, cost: CostModel, count: Ints) -> Ints:
    """Groups whose prompts cost least to compute again, for ``SINGLES_SHARE`` of the cost.

    ``count`` [groups] are the sequences of each group.
    """
    prompt = np.zeros(count.size, np.int64)
    prompt[sequences.groups] = sequences.prompts
    own = np.bincount(sequences.groups, sequences.own_costs(cost), minlength=count.size)
    loss = cost(prompt) * (count - 1)
    order = np.argsort(loss / np.maximum(own, 1e-300), kind="stable")
    chosen: Ints = order[np.cumsum(own[order]) <= SINGLES_SHARE * own.sum()]
    return chosen
