"""Lower bounds: what no plan can beat, however clever."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trainer.batching.cost import CostModel, Floats, Ints
from trainer.batching.sequences import StepSequences


@dataclass(frozen=True)
class LowerBounds:
    """Bounds of one optimizer step."""

    micro_batches: int
    """Fewest micro-batches on the busiest rank."""
    path: float
    """Shortest critical path in units of cost, without the overhead of micro-batches."""
    path_with_overhead: float
    """Shortest critical path in units of cost."""


def lower_bounds(
    sequences: StepSequences, cost: CostModel, budgets: Ints, sync: str
) -> LowerBounds:
    """What no plan of ``sequences`` can beat under ``budgets`` [ranks]; a shared prompt counts
    once.
    """
    own, own_cost = sequences.own_tokens, sequences.own_costs(cost)
    prompts = _prompts_of_groups(sequences)
    prompt_cost = cost(prompts)
    bins = bins_bound(own, int(budgets.max()))
    fewest = micro_batches_bound(bins, budgets, total=int(own.sum()) + int(prompts.sum()))
    path = path_bound(own_cost, own, budgets, once=(prompt_cost, prompts), sync=sync)
    if sync == "micro":
        return LowerBounds(fewest, path, path + cost.overhead * fewest)
    # The rank with most micro-batches need not be the slowest: of the slowest only one is known,
    # and of the mean all.
    ranks = int(budgets.size)
    total = float(own_cost.sum()) + float(prompt_cost.sum()) + cost.overhead * max(bins, ranks)
    return LowerBounds(fewest, path, max(path + cost.overhead, total / ranks))


def _prompts_of_groups(sequences: StepSequences) -> Ints:
    """Tokens of each group's prompt [groups]; none where prompts are not shared."""
    if not sequences.shared or not sequences.groups.size:
        return np.zeros(0, np.int64)
    prompts = np.zeros(int(sequences.groups.max()) + 1, np.int64)
    prompts[sequences.groups] = sequences.prompts
    return prompts


def bins_bound(tokens: Ints, cap: int) -> int:
    """Fewest micro-batches of ``cap`` tokens that hold ``tokens`` [sequences] (Martello and Toth
    1990, bound L2).

    For every threshold a <= cap/2: items above ``cap - a`` share a bin with none of the items of at
    least ``a``; items above half share no bin; the items of a..cap/2 fill what those leave, then
    bins of their own.
    """
    if not tokens.size:
        return 0
    if 2 * int(tokens.max()) <= cap:
        return -(-int(tokens.sum()) // cap)  # no item needs a bin alone, whatever the threshold
    rising = np.sort(tokens)
    sums = np.concatenate([[0], np.cumsum(rising)])
    best = -(-int(sums[-1]) // cap)
    half = int(np.searchsorted(rising, cap / 2, side="right"))  # first item above half of the cap
    big = rising.size - half
    thresholds = rising[:half]
    if not thresholds.size:
        return int(max(best, big))
    first = np.searchsorted(rising, thresholds, side="left")  # items of at least a
    alone = np.searchsorted(rising, cap - thresholds, side="right")  # items above cap - a
    # Room that the items in (cap/2, cap-a] leave.
    left = (alone - half) * cap - (sums[alone] - sums[half])
    more = np.maximum(0, -(-(sums[half] - sums[first] - left) // cap))
    return int(max(best, (big + more).max()))


def micro_batches_bound(bins: int, budgets: Ints, *, total: int) -> int:
    """Fewest micro-batches on the busiest rank, of ``bins`` on all and ``total`` tokens.

    ``budgets`` are [ranks]. A rank without sequences still runs one, a filler.
    """
    return max(-(-total // int(budgets.sum())), -(-bins // int(budgets.size)), 1)


def path_bound(
    cost: Floats, tokens: Ints, budgets: Ints, *, once: tuple[Floats, Ints], sync: str
) -> float:
    """Shortest critical path of any plan, in units of cost.

    ``cost`` and ``tokens`` are [sequences], ``budgets`` [ranks]; ``once`` are costs and tokens of
    the prompts that groups share [groups]. The largest of: the perfect split; the heaviest
    sequence; by pigeonhole, of the j*R+1 heaviest sequences one rank holds j+1, which weigh at
    least as much as the lightest j+1 of them; and :func:`_rows_bound`.
    """
    ranks = int(budgets.size)
    if not cost.size:
        return 0.0
    total = float(cost.sum()) + float(once[0].sum())
    order = np.argsort(-cost, kind="stable")
    falling = cost[order]
    sums = np.concatenate([[0.0], np.cumsum(falling)])
    best = max(total / ranks, float(falling[0]))
    j = np.arange(1, (falling.size - 1) // ranks + 1)
    if j.size:
        end = j * ranks + 1
        best = max(best, float((sums[end] - sums[end - j - 1]).max()))
    if sync != "micro":
        return best
    alone = falling[tokens[order] > int(budgets.max()) // 2]
    paces = np.cumsum(alone[::ranks] if alone.size else falling[:1])
    all_tokens, all_costs = np.append(tokens, once[1]), np.append(cost, once[0])
    return max(best, _rows_bound(all_costs, all_tokens, budgets, paces, total))


def _rows_bound(cost: Floats, tokens: Ints, budgets: Ints, paces: Floats, total: float) -> float:
    """Shortest critical path where every micro-batch synchronises.

    Sequences above half of the largest budget share no micro-batch, so the j-th R of them pace a
    row of their own, and j such rows take at least ``paces[j - 1]``, the sum of the (i*R)-th
    heaviest for i < j. Those rows carry at most the densest sequences that fit their tokens
    (fractional knapsack; density rises with length), and the rest waits for other rows.
    """
    room = np.arange(1, paces.size + 1) * int(budgets.sum())
    dense = np.argsort(-cost / np.maximum(tokens, 1), kind="stable")
    carried = np.interp(room, np.cumsum(tokens[dense]), np.cumsum(cost[dense]))
    rest = np.maximum(0.0, total - carried) / int(budgets.size)
    return float((paces + rest).max())
