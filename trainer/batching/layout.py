"""A layout: which micro-batch of which rank holds each sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np

from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.fast import loops
from trainer.batching.units import Cargo

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """Micro-batches are numbered rank by rank: micro-batch k of rank r is ``sum(counts[:r]) +
    k``.
    """

    bins: Ints
    """int64 [sequences]: number of the micro-batch that holds it."""
    counts: Ints
    """int64 [ranks]: micro-batches of each rank."""
    _weighed: list[tuple[Cargo, CostModel, Ints, Floats]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, micro_batches: list[list[Ints]]) -> Layout:
        """The layout that :meth:`members` lists."""
        flat = [part for rank in micro_batches for part in rank]
        bins = np.repeat(np.arange(len(flat)), [part.size for part in flat])
        out = np.empty(bins.size, np.int64)
        if flat:
            out[np.concatenate(flat)] = bins
        return cls(out, np.array([len(rank) for rank in micro_batches], np.int64))

    def weigh(self, cargo: Cargo, cost: CostModel) -> tuple[Ints, Floats]:
        """Tokens held by, and cost of, each micro-batch; a shared prompt counts once. Both
        [micro-batches].
        """
        if self._weighed and self._weighed[0][0] is cargo and self._weighed[0][1] is cost:
            return self._weighed[0][2:]
        n = int(self.counts.sum())
        tokens = np.bincount(self.bins, cargo.own_tokens, minlength=n)
        if cargo.shared and self.bins.size:
            first = self._first(cargo)
            tokens += np.bincount(self.bins[first], cargo.prompts[first], minlength=n)
            return np.rint(tokens).astype(np.int64), self._costs(cargo, cost, first)
        return np.rint(tokens).astype(np.int64), self._costs(cargo, cost, None)

    def costs(self, cargo: Cargo, cost: CostModel) -> Floats:
        """Cost alone of each micro-batch."""
        compiled = loops("packing", int(self.bins.size))
        if compiled is not None and cargo.shared:
            own, prompts = cargo.own_costs(cost), cargo.prompt_costs(cost)
            out: Floats = compiled.once(
                self.bins, own, prompts, cargo.groups, cargo.by_group, int(self.counts.sum())
            )
            return out
        return self._costs(
            cargo, cost, self._first(cargo) if cargo.shared and self.bins.size else None
        )

    def _costs(self, cargo: Cargo, cost: CostModel, first: Ints | None) -> Floats:
        n = int(self.counts.sum())
        weight: Floats = np.bincount(self.bins, cargo.own_costs(cost), minlength=n).astype(
            np.float64
        )
        if first is not None:
            weight += np.bincount(self.bins[first], cargo.prompt_costs(cost)[first], minlength=n)
        return weight

    def _first(self, cargo: Cargo) -> Ints:
        """The first sequence of each group in each micro-batch."""
        held = self.bins * (int(cargo.groups.max()) + 1) + cargo.groups
        order = np.argsort(held, kind="stable")
        held = held[order]
        first: Ints = order[np.append(True, held[1:] != held[:-1])]
        return first

    def members(self) -> list[list[Ints]]:
        """Indices of sequences, [rank][k], ascending inside a micro-batch but for groups, which
        stand together.
        """
        order = np.argsort(self.bins, kind="stable")
        ends = [0, *np.cumsum(np.bincount(self.bins, minlength=int(self.counts.sum()))).tolist()]
        parts = [order[a:b] for a, b in pairwise(ends)]
        return per_rank(parts, self.counts)

    def ordered(self, cargo: Cargo, cost: CostModel, *, together: bool) -> Layout:
        """The same load with heavy micro-batches first, so that the allocator reuses the blocks of
        the first ones.

        ``together``: micro-batch k moves on all ranks at once (they run it at the same time), by
        the largest of them.
        """
        tokens, weight = self.weigh(cargo, cost)
        starts = np.concatenate([[0], np.cumsum(self.counts)])[:-1]
        new = np.empty(tokens.size, np.int64)
        if together:
            k = int(self.counts[0])
            rows_tokens, rows_cost = tokens.reshape(-1, k).max(0), weight.reshape(-1, k).max(0)
            place = np.empty(k, np.int64)
            place[np.lexsort((np.arange(k), -rows_cost, -rows_tokens))] = np.arange(k)
            new = (starts[:, None] + place[None, :]).reshape(-1)
        else:
            rank = np.repeat(np.arange(self.counts.size), self.counts)
            new[np.lexsort((np.arange(tokens.size), -weight, -tokens, rank))] = np.arange(
                tokens.size
            )
        out = Layout(new[self.bins], self.counts)
        moved_tokens, moved_weight = np.empty_like(tokens), np.empty_like(weight)
        moved_tokens[new], moved_weight[new] = tokens, weight
        out._weighed.append(
            (cargo, cost, moved_tokens, moved_weight)
        )  # bins only changed their numbers
        return out


def per_rank(values: list[T], counts: Ints) -> list[list[T]]:
    """One value per micro-batch, rank by rank, as lists of each rank."""
    at = [0, *np.cumsum(counts).tolist()]
    return [values[a:b] for a, b in pairwise(at)]
