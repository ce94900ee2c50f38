"""Which micro-batch of which rank holds each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np

from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.loops import accelerated
from trainer.batching.loops.sums import shared_sums
from trainer.batching.sequences import StepSequences

T = TypeVar("T")


@dataclass(frozen=True)
class Assignment:
    """Micro-batches are numbered rank by rank: micro-batch k of rank r is ``sum(counts[:r]) +
    k``.
    """

    bins: Ints
    """int64 [sequences]: number of the micro-batch that holds it."""
    counts: Ints
    """int64 [ranks]: micro-batches of each rank."""
    # The tokens and costs that are known, of these sequences and this cost model.
    _loads: list[tuple[StepSequences, CostModel, Ints, Floats]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, micro_batches: list[list[Ints]]) -> Assignment:
        """The assignment with these indices of sequences, by rank and micro-batch."""
        flat = [part for rank in micro_batches for part in rank]
        bins = np.repeat(np.arange(len(flat)), [part.size for part in flat])
        out = np.empty(bins.size, np.int64)
        if flat:
            out[np.concatenate(flat)] = bins
        return cls(out, np.array([len(rank) for rank in micro_batches], np.int64))

    def loads(self, sequences: StepSequences, cost: CostModel) -> tuple[Ints, Floats]:
        """Tokens held by each micro-batch and its cost, both [micro-batches].

        A shared prompt counts once.
        """
        if self._loads and self._loads[0][0] is sequences and self._loads[0][1] is cost:
            return self._loads[0][2:]
        tokens = self._sums(sequences, sequences.own_tokens, sequences.prompts)
        return np.rint(tokens).astype(np.int64), self.costs(sequences, cost)

    def costs(self, sequences: StepSequences, cost: CostModel) -> Floats:
        """Cost of each micro-batch [micro-batches]."""
        prompts = sequences.prompt_costs(cost) if sequences.shared else None
        return self._sums(sequences, sequences.own_costs(cost), prompts)

    def _sums(
        self, sequences: StepSequences, own: Ints | Floats, prompts: Ints | Floats | None
    ) -> Floats:
        """Sum of ``own`` over each micro-batch, and of each group's prompt once, [micro-batches].

        ``own`` and ``prompts`` are [sequences]; ``prompts`` counts only where they are shared.
        """
        count = int(self.counts.sum())
        if not sequences.shared or prompts is None or not self.bins.size:
            return np.bincount(self.bins, own, minlength=count).astype(np.float64)
        out: Floats = accelerated(shared_sums, int(self.bins.size))(
            self.bins,
            own.astype(np.float64),
            prompts.astype(np.float64),
            sequences.groups,
            sequences.by_group,
            count,
        )
        return out

    def members(self) -> list[list[Ints]]:
        """Indices of sequences, [rank][k], rising inside a micro-batch."""
        order = np.argsort(self.bins, kind="stable")
        ends = [0, *np.cumsum(np.bincount(self.bins, minlength=int(self.counts.sum()))).tolist()]
        parts = [order[a:b] for a, b in pairwise(ends)]
        return per_rank(parts, self.counts)

    def heaviest_first(
        self, sequences: StepSequences, cost: CostModel, *, together: bool
    ) -> Assignment:
        """The same micro-batches with heavy ones first, so that the allocator reuses the blocks of
        the first ones.

        ``together``: micro-batch k moves on all ranks at once (they run it at the same time), by
        the largest of them.
        """
        tokens, costs = self.loads(sequences, cost)
        new = np.empty(tokens.size, np.int64)
        if together:
            k = int(self.counts[0])
            row_tokens, row_costs = tokens.reshape(-1, k).max(0), costs.reshape(-1, k).max(0)
            place = np.empty(k, np.int64)
            place[np.lexsort((np.arange(k), -row_costs, -row_tokens))] = np.arange(k)
            starts = np.cumsum(self.counts) - self.counts
            new = (starts[:, None] + place[None, :]).reshape(-1)
        else:
            rank = np.repeat(np.arange(self.counts.size), self.counts)
            order = np.lexsort((np.arange(tokens.size), -costs, -tokens, rank))
            new[order] = np.arange(tokens.size)
        out = Assignment(new[self.bins], self.counts)
        new_tokens = np.empty_like(tokens)
        new_tokens[new] = tokens
        new_costs = np.empty_like(costs)
        new_costs[new] = costs
        out._loads.append((sequences, cost, new_tokens, new_costs))  # only the numbers changed
        return out


def per_rank(values: list[T], counts: Ints) -> list[list[T]]:
    """Values [micro-batches], rank by rank, as one list per rank; ``counts`` int64 [ranks]."""
    ends = [0, *np.cumsum(counts).tolist()]
    return [values[a:b] for a, b in pairwise(ends)]
