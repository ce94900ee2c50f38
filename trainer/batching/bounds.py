"""Lower bounds: what no plan can beat, however clever."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.units import Cargo


@dataclass(frozen=True)
class Proof:
    """Bounds of one step."""

    micro_batches: int
    """Fewest micro-batches on the busiest rank."""
    path: float
    """Least critical path in units of cost, fixed costs of micro-batches left out."""
    whole: float
    """The same with them."""


def prove(cargo: Cargo, cost: CostModel, budgets: Ints, sync: str) -> Proof:
    """What no plan of ``cargo`` can beat; a shared prompt counts once."""
    own, own_cost = cargo.own_tokens, cargo.own_costs(cost)
    prompts = np.zeros(
        int(cargo.groups.max()) + 1 if cargo.shared and cargo.groups.size else 0, np.int64
    )
    if cargo.shared:
        prompts[cargo.groups] = cargo.prompts
    once = cost(prompts)
    bins = bins_bound(own, int(budgets.max()))
    fewest = micro_batches_bound(bins, budgets, total=int(own.sum()) + int(prompts.sum()))
    path = path_bound(own_cost, own, budgets, once=(once, prompts), sync=sync)
    if sync == "micro":
        return Proof(fewest, path, path + cost.overhead * fewest)
    # The rank with most micro-batches need not be the slowest: of the slowest only one is known,
    # and of the mean all.
    ranks = int(budgets.size)
    mean = float(own_cost.sum()) + float(once.sum()) + cost.overhead * max(bins, ranks)
    return Proof(fewest, path, max(path + cost.overhead, mean / ranks))


def bins_bound(tokens: Ints, cap: int) -> int:
    """Fewest micro-batches of ``cap`` tokens that hold ``tokens`` (Martello and Toth 1990, bound
    L2).

    For every threshold a <= cap/2: items above ``cap - a`` sit with none of the items of at least
    ``a``; items above half sit alone; the items of a..cap/2 fill what those leave, then bins of
    their own.
    """
    if not tokens.size:
        return 0
    if 2 * int(tokens.max()) <= cap:
        return -(-int(tokens.sum()) // cap)  # none stands alone, whatever the threshold
    up = np.sort(tokens)
    sums = np.concatenate([[0], np.cumsum(up)])
    best = -(-int(sums[-1]) // cap)
    half = int(np.searchsorted(up, cap / 2, side="right"))  # first item above half of the cap
    thresholds = up[:half]
    first = np.searchsorted(up, thresholds, side="left")  # items of at least a
    alone = np.searchsorted(up, cap - thresholds, side="right")  # items above cap - a
    big = up.size - half
    left = (alone - half) * cap - (
        sums[alone] - sums[half]
    )  # room beside the items in (cap/2, cap-a]
    more = np.maximum(0, -(-(sums[half] - sums[first] - left) // cap))
    return int(max(best, big, (big + more).max() if thresholds.size else 0))


def micro_batches_bound(bins: int, budgets: Ints, *, total: int) -> int:
    """Fewest micro-batches on the busiest rank, of ``bins`` on all and ``total`` tokens.

    A rank without sequences still runs one, a filler.
    """
    return max(-(-total // int(budgets.sum())), -(-bins // int(budgets.size)), 1)


def path_bound(
    cost: Floats, tokens: Ints, budgets: Ints, *, once: tuple[Floats, Ints], sync: str
) -> float:
    """Least critical path of any plan, in units of cost; ``once``: costs and tokens of prompts that
    groups share.

    The perfect split; the heaviest sequence; and by pigeonhole: of the j*R+1 heaviest sequences one
    rank holds j+1, which weigh at least as much as the lightest j+1 of them. When every micro-batch
    synchronises also: sequences above half of the largest budget share no micro-batch, so the j-th
    R of them pace a row of their own and j such rows take at least the sum of the (i*R)-th
    heaviest, i < j. They carry at most the densest cargo that fits their tokens (fractional
    knapsack; density rises with length), and the rest waits for other rows.
    """
    ranks = int(budgets.size)
    if not cost.size:
        return 0.0
    total = float(cost.sum()) + float(once[0].sum())
    order = np.argsort(-cost, kind="stable")
    down = cost[order]
    sums = np.concatenate([[0.0], np.cumsum(down)])
    best = max(total / ranks, float(down[0]))
    j = np.arange(1, (down.size - 1) // ranks + 1)
    if j.size:
        end = j * ranks + 1
        best = max(best, float((sums[end] - sums[end - j - 1]).max()))
    if sync == "micro":
        alone = down[tokens[order] > int(budgets.max()) // 2]
        paces = np.cumsum(alone[::ranks] if alone.size else down[:1])
        room = np.arange(1, paces.size + 1) * int(budgets.sum())
        tokens, cost = np.append(tokens, once[1]), np.append(cost, once[0])
        dense = np.argsort(-cost / np.maximum(tokens, 1), kind="stable")
        carried = np.interp(room, np.cumsum(tokens[dense]), np.cumsum(cost[dense]))
        best = max(best, float((paces + np.maximum(0.0, total - carried) / ranks).max()))
    return best
