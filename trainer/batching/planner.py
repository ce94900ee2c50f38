"""Lengths in, plan out: which rank computes which sequences in which micro-batch of one optimizer
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from trainer.base.errors import UserError
from trainer.batching import search
from trainer.batching.bounds import Proof, prove
from trainer.batching.buckets import assign_buckets
from trainer.batching.cost import TOKENS, CostModel, Ints
from trainer.batching.inputs import (
    BOUNDARY_KEYS,
    check_budgets,
    check_fits,
    check_groups,
    check_lengths,
    check_prompts,
    check_shared,
)
from trainer.batching.layout import Layout, per_rank
from trainer.batching.units import Cargo

Sync = Literal["micro", "step"]


@dataclass(frozen=True)
class Plan:
    """One optimizer step, loaded. Lists are indexed [rank][k]; costs are in the units of the cost
    model.
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
    cargo: Cargo = field(repr=False)
    """What was planned, checked; kept for a later split."""
    cost: CostModel
    """What it was weighed with."""
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
        layout = Layout.of(self.micro_batches)
        _, squares = layout.weigh(self.cargo, CostModel(0.0, 1.0))
        return per_rank(squares.tolist(), layout.counts)

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
        return (
            max(0.0, self.critical_path / self.critical_path_bound - 1.0)
            if self.critical_path_bound
            else 0.0
        )

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
    """Load the sequences of one optimizer step onto ``ranks`` ranks.

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
    plans. Raises :class:`trainer.base.errors.UserError` on inputs that no plan can satisfy.
    """
    began = perf_counter()
    if sync not in ("micro", "step"):
        raise UserError(f"sync={sync!r}: write 'micro' (ZeRO-2/3, TP, SP) or 'step' (ZeRO-0/1)")
    model = cost or TOKENS
    sizes = check_lengths(lengths)
    budgets = check_budgets(budget, ranks)
    check_fits(sizes, budgets)
    cargo = make_cargo(
        sizes, groups, prompt_lengths, buckets, bucket_by, keep_groups, share_prompts
    )
    proof = prove(cargo, model, budgets, sync)
    layout = search.search(cargo, model, budgets, sync, proof, keep_groups=keep_groups)
    ordered = layout.ordered(cargo, model, together=sync == "micro")
    return weigh_plan(cargo, model, budgets, sync, ordered, began, proof)


def make_cargo(
    sizes: Ints,
    groups: ArrayLike | None,
    prompt_lengths: ArrayLike | None,
    boundaries: ArrayLike | None,
    bucket_by: str,
    keep_groups: bool,
    share_prompts: bool,
) -> Cargo:
    """Check what belongs together and gather it."""
    n = sizes.size
    prompts = None if prompt_lengths is None else check_prompts(prompt_lengths, sizes)
    grouped = np.arange(n) if groups is None else check_groups(groups, sizes)
    if (keep_groups or share_prompts) and groups is None:
        raise UserError("keep_groups and share_prompts need groups: one group number per sequence")
    if share_prompts:
        if prompts is None:
            raise UserError("share_prompts needs prompt_lengths: one per sequence")
        check_shared(prompts, grouped)
    which = np.zeros(n, np.int64)
    if boundaries is not None:
        if bucket_by not in ("prompt", "total"):
            raise UserError(f"bucket_by={bucket_by!r}: write 'prompt' or 'total'")
        if bucket_by == "prompt" and prompts is None:
            raise UserError(
                f"{BOUNDARY_KEYS} by prompt need prompt_lengths; pass them, or set bucket_by=total"
            )
        which = assign_buckets(
            sizes if prompts is None or bucket_by == "total" else prompts, boundaries
        )
    shared = share_prompts and prompts is not None
    return Cargo(
        sizes,
        prompts if shared and prompts is not None else np.zeros(n, np.int64),
        grouped,
        which,
        shared,
    )


def weigh_plan(
    cargo: Cargo,
    cost: CostModel,
    budgets: Ints,
    sync: Sync,
    layout: Layout,
    began: float,
    proof: Proof,
) -> Plan:
    """The plan of a given layout: weigh it, check the cap and state the bounds. ``began``: of
    perf_counter.
    """
    tokens, weights = layout.weigh(cargo, cost)
    caps = np.repeat(budgets, layout.counts)
    if (tokens > caps).any():
        raise AssertionError(
            f"a micro-batch holds {int(tokens[tokens > caps][0])} tokens, over its cap"
        )
    if sync == "step":
        rank = np.repeat(np.arange(layout.counts.size), layout.counts)
        path = float(np.bincount(rank, weights + cost.overhead).max())
    else:
        path = float((weights + cost.overhead).reshape(layout.counts.size, -1).max(0).sum())
    return Plan(
        micro_batches=layout.members(),
        tokens=per_rank(tokens.tolist(), layout.counts),
        costs=per_rank(weights.tolist(), layout.counts),
        budgets=budgets,
        sync=sync,
        critical_path=path,
        critical_path_bound=proof.whole,
        micro_batches_bound=proof.micro_batches,
        tokens_saved=int(cargo.lengths.sum()) - int(tokens.sum()),
        cargo=cargo,
        cost=cost,
        plan_ms=(perf_counter() - began) * 1e3,
    )
