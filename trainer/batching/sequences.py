"""The sequences of one optimizer step: their lengths, prompts, groups and buckets."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.base.errors import UserError
from trainer.batching.buckets import assign_buckets
from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.inputs import BOUNDARY_KEYS, check_groups, check_prompts, check_shared


class GroupOrder(NamedTuple):
    """Sequences sorted by group, then bucket, then falling length. All arrays are [sequences]."""

    order: Ints
    """Index of each sequence."""
    opens: NDArray[np.bool_]
    """Whether a group or a bucket begins at this place."""
    own_tokens: Ints
    prompts: Ints
    groups: Ints
    buckets: Ints


@dataclass(frozen=True)
class StepSequences:
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
    # The costs that were asked for last: one plan asks for the same ones many times.
    _own_costs: list[tuple[CostModel, Floats]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )
    _prompt_costs: list[tuple[CostModel, Floats]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @cached_property
    def own_tokens(self) -> Ints:
        """Tokens that a sequence adds to a micro-batch that holds its prompt already
        [sequences].
        """
        return self.lengths - self.prompts if self.shared else self.lengths

    def own_costs(self, cost: CostModel) -> Floats:
        """Cost that a sequence adds to a micro-batch that holds its prompt already [sequences]."""
        if not self._own_costs or self._own_costs[0][0] is not cost:
            own = cost.responses(self.lengths, self.prompts) if self.shared else cost(self.lengths)
            self._own_costs[:] = [(cost, own)]
        return self._own_costs[0][1]

    def prompt_costs(self, cost: CostModel) -> Floats:
        """Cost of each sequence's prompt [sequences]; 0 where prompts are not shared."""
        if not self._prompt_costs or self._prompt_costs[0][0] is not cost:
            self._prompt_costs[:] = [(cost, cost(self.prompts))]
        return self._prompt_costs[0][1]

    @cached_property
    def by_group(self) -> Ints:
        """Indices of the sequences, group by group [sequences]."""
        return np.argsort(self.groups, kind="stable")

    @cached_property
    def group_order(self) -> GroupOrder:
        """The order in which groups are cut into pieces, whatever their size."""
        order = np.lexsort((-self.own_tokens, self.buckets, self.groups))  # stable
        group = self.groups[order]
        bucket = self.buckets[order]
        opens = np.ones(order.size, bool)
        opens[1:] = (group[1:] != group[:-1]) | (bucket[1:] != bucket[:-1])
        return GroupOrder(order, opens, self.own_tokens[order], self.prompts[order], group, bucket)

    def subset(self, indices: Ints) -> StepSequences:
        """The sequences at ``indices`` int64 [n], in that order."""
        return StepSequences(
            self.lengths[indices],
            self.prompts[indices],
            self.groups[indices],
            self.buckets[indices],
            self.shared,
        )


def check_sequences(
    sizes: Ints,
    groups: ArrayLike | None,
    prompt_lengths: ArrayLike | None,
    boundaries: ArrayLike | None,
    bucket_by: str,
    keep_groups: bool,
    share_prompts: bool,
) -> StepSequences:
    """The arguments of :func:`trainer.batching.planner.plan`, checked.

    ``sizes`` are checked lengths, the other arrays are as the user passed them, all [sequences].

    Raises UserError where groups, prompts or buckets don't go together.
    """
    n = sizes.size
    prompts = None if prompt_lengths is None else check_prompts(prompt_lengths, sizes)
    grouped = np.arange(n) if groups is None else check_groups(groups, sizes)
    if (keep_groups or share_prompts) and groups is None:
        raise UserError("keep_groups and share_prompts need groups: one group number per sequence")
    held_once = np.zeros(n, np.int64)
    if share_prompts:
        if prompts is None:
            raise UserError("share_prompts needs prompt_lengths: one per sequence")
        check_shared(prompts, grouped)
        held_once = prompts
    bucket = np.zeros(n, np.int64)
    if boundaries is not None:
        bucket = _buckets(sizes, prompts, boundaries, bucket_by)
    return StepSequences(sizes, held_once, grouped, bucket, share_prompts)


def _buckets(sizes: Ints, prompts: Ints | None, boundaries: ArrayLike, bucket_by: str) -> Ints:
    """Bucket of each sequence [sequences] by prompt or total length."""
    if bucket_by == "total":
        return assign_buckets(sizes, boundaries)
    if bucket_by != "prompt":
        raise UserError(f"bucket_by={bucket_by!r}: write 'prompt' or 'total'")
    if prompts is None:
        raise UserError(
            f"{BOUNDARY_KEYS} by prompt need prompt_lengths; pass them, or set bucket_by=total"
        )
    return assign_buckets(prompts, boundaries)
