"""Which rank computes which sequences in which micro-batch of one optimizer step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from trainer.base.errors import UserError
from trainer.batching.assignment import Assignment, per_rank
from trainer.batching.bounds import LowerBounds, lower_bounds
from trainer.batching.cost import TOKENS, CostModel, Ints
from trainer.batching.inputs import check_budgets, check_fits, check_lengths
from trainer.batching.search import path_of_costs, search
from trainer.batching.sequences import StepSequences, check_sequences

Sync = Literal["micro", "step"]


@dataclass(frozen=True)
class Plan:
    """The micro-batches of one optimizer step.

    Lists are indexed [rank][k]; costs are in the units of the cost model.
    """

    micro_batches: list[list[Ints]]
    """Indices of the sequences of each micro-batch; an empty array is a zero-loss filler."""
    tokens: list[list[int]]
    """Tokens really held by each micro-batch: a shared prompt counts once."""
    costs: list[list[float]]
    """Predicted cost of each micro-batch."""
    budgets: Ints
    """int64 [ranks], tokens per micro-batch."""
    sync: Sync
    """Where ranks wait for each other: after every ``micro`` batch, or once a ``step``."""
    critical_path: float
    """Predicted cost of the step: the sum over k of the slowest rank (micro), or the slowest rank's
    sum (step).
    """
    critical_path_bound: float
    """What no plan can beat."""
    micro_batches_bound: int
    """Fewest micro-batches per rank that any plan needs."""
    tokens_saved: int
    """Prompt tokens not computed again because a group shares them."""
    sequences: StepSequences = field(repr=False)
    """What was planned; kept to split micro-batches later."""
    cost: CostModel
    """The cost model that ``costs`` come from."""
    padding: int = 0
    """Tokens of padding computed on top; 0 unless sequences are padded to their micro-batch's
    longest.
    """
    plan_ms: float = field(default=0.0, compare=False)
    """Time this plan took to make, in milliseconds."""

    @property
    def num_micro_batches(self) -> list[int]:
        """Micro-batches of each rank; all equal when ``sync="micro"``."""
        return [len(rank) for rank in self.micro_batches]

    def squares(self) -> list[list[float]]:
        """Sum over sequences of the squared length, [rank][k]: what attention is proportional to.

        A shared prompt counts once, a response of R tokens behind P of prompt counts ``(P + R)**2 -
        P**2``.
        """
        assignment = Assignment.of(self.micro_batches)
        squares = assignment.costs(self.sequences, CostModel(0.0, 1.0))
        return per_rank(squares.tolist(), assignment.counts)

    @property
    def efficiency(self) -> float:
        """Share of the ranks' time that computes, 1 is perfect: total cost / (ranks x critical
        path).
        """
        total = sum(map(sum, self.costs))
        return total / (len(self.costs) * self.critical_path) if self.critical_path else 1.0

    @property
    def gap(self) -> float:
        """Critical path over its lower bound, less 1; 0 is proven best."""
        if not self.critical_path_bound:
            return 0.0
        return max(0.0, self.critical_path / self.critical_path_bound - 1.0)

    def metrics(self) -> dict[str, float]:
        """What one step logs under ``batch/``."""
        held = sum(map(sum, self.tokens))
        room = sum(k * int(b) for k, b in zip(self.num_micro_batches, self.budgets, strict=True))
        loads = [sum(c) for c in self.costs]
        mean = sum(loads) / len(loads)
        return {
            "batch/num_micro_batches": float(max(self.num_micro_batches)),
            "batch/lower_bound": float(self.micro_batches_bound),
            "batch/fill_ratio": held / room if room else 0.0,
            "batch/pad_fraction": self.padding / (held + self.padding) if held else 0.0,
            "batch/dp_imbalance": max(loads) / mean - 1.0 if mean else 0.0,
            "batch/critical_path_gap": self.gap,
            "batch/plan_ms": self.plan_ms,
            "batch/tokens_saved_by_sharing": float(self.tokens_saved),
        }


def plan(
    lengths: ArrayLike,
    budget: int | Sequence[int] | Ints,
    ranks: int,
    sync: Sync = "micro",
    *,
    cost: CostModel | None = None,
    groups: ArrayLike | None = None,
    prompt_lengths: ArrayLike | None = None,
    buckets: ArrayLike | None = None,
    bucket_by: Literal["prompt", "total"] = "prompt",
    keep_groups: bool = False,
    share_prompts: bool = False,
) -> Plan:
    """Plan the micro-batches of one optimizer step on ``ranks`` ranks.

    ``lengths`` [sequences] are tokens of prompt and response together; ``budget`` is a hard cap on
    the tokens of a micro-batch, one number or one per rank. ``sync="micro"`` (ZeRO-2/3, tensor or
    sequence parallel) gives every rank the same number of micro-batches, with empty fillers where
    needed, and makes the sum over k of the slowest rank small; ``"step"`` (ZeRO-0/1) makes the
    slowest rank's sum small. ``cost`` weighs sequences (tokens by default). ``buckets`` are rising
    boundaries over prompt or total length; sequences of two buckets never share a micro-batch. With
    ``share_prompts`` the prompt of a group counts once per micro-batch, in the cap and in the cost.
    ``keep_groups`` keeps the sequences of a group in one micro-batch as long as the smallest budget
    holds them.

    Every sequence is planned exactly once, heavy micro-batches first, and equal inputs give equal
    plans. Raises UserError on inputs that no plan can satisfy.
    """
    began = perf_counter()
    if sync not in ("micro", "step"):
        raise UserError(f"sync={sync!r}: write 'micro' (ZeRO-2/3, TP, SP) or 'step' (ZeRO-0/1)")
    model = cost or TOKENS
    sizes = check_lengths(lengths)
    budgets = check_budgets(budget, ranks)
    check_fits(sizes, budgets)
    sequences = check_sequences(
        sizes, groups, prompt_lengths, buckets, bucket_by, keep_groups, share_prompts
    )
    bounds = lower_bounds(sequences, model, budgets, sync)
    assignment = search(sequences, model, budgets, sync, bounds, keep_groups=keep_groups)
    ordered = assignment.heaviest_first(sequences, model, together=sync == "micro")
    return plan_of(ordered, sequences, model, budgets, sync, bounds, began)


def plan_of(
    assignment: Assignment,
    sequences: StepSequences,
    cost: CostModel,
    budgets: Ints,
    sync: Sync,
    bounds: LowerBounds,
    began: float,
) -> Plan:
    """The plan of an assignment: its tokens, checked against the caps, its costs and its bounds.

    ``budgets``: int64 [ranks]. ``began`` is when planning began, on the clock of ``perf_counter``.
    """
    tokens, costs = assignment.loads(sequences, cost)
    caps = np.repeat(budgets, assignment.counts)
    if (tokens > caps).any():
        raise AssertionError(
            f"a micro-batch holds {int(tokens[tokens > caps][0])} tokens, over its cap"
        )
    return Plan(
        micro_batches=assignment.members(),
        tokens=per_rank(tokens.tolist(), assignment.counts),
        costs=per_rank(costs.tolist(), assignment.counts),
        budgets=budgets,
        sync=sync,
        critical_path=path_of_costs(costs + cost.overhead, assignment.counts, sync),
        critical_path_bound=bounds.path_with_overhead,
        micro_batches_bound=bounds.micro_batches,
        tokens_saved=int(sequences.lengths.sum()) - int(tokens.sum()),
        sequences=sequences,
        cost=cost,
        plan_ms=(perf_counter() - began) * 1e3,
    )
