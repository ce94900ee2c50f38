"""Units: what the planner moves as one piece. A sequence, or several sequences of one group around
one prompt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.fast import loops
from trainer.batching.packing import ByCost

SPLIT = 0.25
"""Share of the cost whose groups are split into single sequences by the mixed way of
:func:`stowages`.
"""


class Stacked(NamedTuple):
    """Sequences of each group and bucket side by side, longest first. All arrays are
    [sequences].
    """

    order: Ints
    opens: NDArray[np.bool_]
    """Whether a group or a bucket begins here."""
    own: Ints
    prompts: Ints
    groups: Ints
    buckets: Ints


@dataclass(frozen=True)
class Cargo:
    """The sequences of one optimizer step, checked. All arrays are [sequences]."""

    lengths: Ints
    """Prompt and response, in tokens."""
    prompts: Ints
    """Tokens of the prompt; zeros when prompts are not shared."""
    groups: Ints
    """0 .. groups-1; sequences of one prompt share it."""
    buckets: Ints
    """Bucket of each sequence; zeros without buckets."""
    shared: bool
    """Whether a group's prompt counts once per micro-batch."""
    # What was asked for last, for it is asked for again and again.
    _own: list[tuple[CostModel, Floats]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _prompts: list[tuple[CostModel, Floats]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @cached_property
    def own_tokens(self) -> Ints:
        """What a sequence adds to a micro-batch that holds its prompt already."""
        return self.lengths - self.prompts if self.shared else self.lengths

    def own_costs(self, cost: CostModel) -> Floats:
        """Like :attr:`own_tokens`, in units of cost."""
        if not self._own or self._own[0][0] is not cost:
            own = cost.responses(self.lengths, self.prompts) if self.shared else cost(self.lengths)
            self._own[:] = [(cost, own)]
        return self._own[0][1]

    @cached_property
    def by_group(self) -> Ints:
        """Sequences, group by group."""
        return np.argsort(self.groups, kind="stable")

    @cached_property
    def stacked(self) -> Stacked:
        """What :func:`pieces` are cut from, whatever their size."""
        order = np.lexsort((-self.own_tokens, self.buckets, self.groups))  # stable
        group, bucket = self.groups[order], self.buckets[order]
        opens = np.ones(order.size, bool)
        opens[1:] = (group[1:] != group[:-1]) | (bucket[1:] != bucket[:-1])
        return Stacked(order, opens, self.own_tokens[order], self.prompts[order], group, bucket)

    def prompt_costs(self, cost: CostModel) -> Floats:
        """Cost of each sequence's prompt, 0 where prompts are not shared."""
        if not self._prompts or self._prompts[0][0] is not cost:
            self._prompts[:] = [(cost, cost(self.prompts))]
        return self._prompts[0][1]


@dataclass(frozen=True)
class Units:
    """Pieces of cargo. ``members[starts[u]:starts[u + 1]]`` are the sequences of unit u."""

    tokens: Ints
    cost: Floats
    buckets: Ints
    members: Ints
    starts: Ints

    @cached_property
    def by_cost(self) -> ByCost:
        """Units by rising cost."""
        return ByCost.of(self.cost, self.tokens)

    @cached_property
    def mixed(self) -> bool:
        """Whether they are of more than one bucket."""
        return bool(self.buckets.size) and int(self.buckets.min()) != int(self.buckets.max())

    @cached_property
    def held(self) -> int:
        """Tokens of all."""
        return int(self.tokens.sum())

    @cached_property
    def weight(self) -> float:
        """Cost of all."""
        return float(self.cost.sum())

    @cached_property
    def unit_of(self) -> Ints:
        """int64 [sequences]: the unit that a sequence is part of."""
        out = np.empty(self.members.size, np.int64)
        out[self.members] = np.repeat(np.arange(len(self)), np.diff(self.starts))
        return out

    def __len__(self) -> int:
        return int(self.tokens.size)


def subset(cargo: Cargo, which: Ints) -> Cargo:
    """The sequences ``which`` of ``cargo``, in that order."""
    return Cargo(
        cargo.lengths[which],
        cargo.prompts[which],
        cargo.groups[which],
        cargo.buckets[which],
        cargo.shared,
    )


def singles(cargo: Cargo, cost: CostModel) -> Units:
    """One unit per sequence."""
    n = cargo.lengths.size
    return Units(cargo.lengths, cost(cargo.lengths), cargo.buckets, np.arange(n), np.arange(n + 1))


def pieces(cargo: Cargo, cost: CostModel, sizes: int | Ints, cap: int) -> Units:
    """Units of at most ``sizes`` sequences of one group and bucket, none of more than ``cap``
    tokens.

    ``sizes`` is one number, or one per group.

    Within a group sequences are taken longest first, so that the pieces of a group are alike
    inside.
    """
    order, opens, own, prompts, groups, buckets = cargo.stacked
    count_of = sizes[groups] if isinstance(sizes, np.ndarray) else np.full(own.size, sizes)
    first = _cuts(opens, own, prompts, count_of, cap)
    tokens = np.add.reduceat(own, first) if first.size else own
    weight = np.add.reduceat(cargo.own_costs(cost)[order], first) if first.size else np.zeros(0)
    if cargo.shared and first.size:
        tokens = tokens + prompts[first]
        weight = weight + cargo.prompt_costs(cost)[order[first]]
    return Units(tokens, weight, buckets[first], order, np.append(first, order.size))


def _cuts(opens: NDArray[np.bool_], own: Ints, prompts: Ints, most: Ints, cap: int) -> Ints:
    """Where pieces start: where one ``opens``, or the last is full by count or tokens. ``prompts``:
    0 if not shared.
    """
    compiled = loops("packing", int(own.size))
    if compiled is not None:
        found: Ints = compiled.cuts(opens, own, prompts, most, cap)
        return found
    starts: list[int] = []
    held = count = 0
    parts = zip(opens.tolist(), own.tolist(), prompts.tolist(), most.tolist(), strict=True)
    for i, (new, mine, prompt, size) in enumerate(parts):
        if new or count == size or held + mine > cap:
            starts.append(i)
            held, count = prompt, 0
        held += mine
        count += 1
    return np.array(starts, np.int64)


def stowages(cargo: Cargo, cost: CostModel, cap: int) -> list[Units]:
    """Ways to cut groups with shared prompts into units, coarse to fine.

    Whole groups save most; pieces level better, and the best is in between. One way splits only
    some groups, those whose prompts cost least to compute again, so that small units are at hand to
    level the rest.
    """
    count = np.bincount(cargo.groups)
    largest = int(count.max())
    whole = pieces(cargo, cost, largest, cap)
    if largest == 1:
        return [whole]
    prompt = np.zeros(count.size, np.int64)
    prompt[cargo.groups] = cargo.prompts
    own = np.bincount(cargo.groups, cargo.own_costs(cost), minlength=count.size)
    loss = cost(prompt) * (count - 1)
    order = np.argsort(loss / np.maximum(own, 1e-300), kind="stable")
    chosen = order[np.cumsum(own[order]) <= SPLIT * own.sum()]
    some = np.full(count.size, largest)
    some[chosen] = 1
    out = [whole, pieces(cargo, cost, some, cap)]
    size = largest // 2
    while size >= 2:
        out.append(pieces(cargo, cost, size, cap))
        size //= 2
    return [*out, singles(cargo, cost)]
