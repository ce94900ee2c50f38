"""The bars of the planner's benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Report
from benchmarks.peers import PEERS
from benchmarks.planner_cases import (
    LONGEST,
    SHAPES,
    TRACES,
    held_out,
    read_lengths,
    read_parts,
    timed_plan,
)
from benchmarks.planner_rows import OURS, STATIC, Row, paths, same_setting
from trainer.batching import CostModel, plan

TIE = 1e-4
"""A peer is ahead when its efficiency is higher by more than this; closer is a tie by rounding."""
BARS = (
    ("gsm8k_train", 8192, 0.999),
    ("search_r1_qwen2.5_7b", 8192, 0.992),
    ("search_r1_qwen2.5_7b", 16384, 0.999),
    ("intern_s1_math", LONGEST, 0.970),
    ("intern_s1_math", 65536, 0.999),
)
SYNCS = ("micro", "step")


class Extreme(NamedTuple):
    """A figure and the case that it is of."""

    value: float
    case: str


def hold_to_bars(report: Report, quick: bool) -> None:
    """Check the rows of ``report``, then lengths that no setting has, then the time of a plan."""
    ours = [row for row in report.rows if row["algorithm"] == OURS]
    over = max(row["over cap %"] for row in ours)
    report.check("over-cap micro-batches of ours, %", over, 0.0, at_most=True)
    _hold_efficiency(report, ours)
    _hold_lead(report, ours, quick)
    lead = smallest_lead_held_out(quick)
    name = f"lead over the best cap-holding peer, held-out lengths, smallest ({lead.case})"
    report.check(name, lead.value, -TIE)
    _hold_times(report, ours, quick)


def _hold_efficiency(report: Report, ours: list[Row]) -> None:
    at = {(r["trace"], r["budget"], r["sequences"], r["ranks"]): r for r in ours}
    for trace, budget, bar in BARS:
        name = f"micro efficiency, 7B, {trace}, budget {budget}"
        report.check(name, at[trace, budget, 256, 8]["7B micro"], bar)
    eight = [r for r in ours if r["ranks"] == 8 and r["sequences"] == 256]
    for model in SHAPES:
        worst = min(r[f"{model} step"] for r in eight)
        report.check(f"step efficiency, {model}, worst of 8 ranks", worst, 0.998)


def _hold_lead(report: Report, ours: list[Row], quick: bool) -> None:
    """No peer that holds the cap is ahead; where one is at 64 ranks, the bound is near."""
    lead, gap = Extreme(1.0, ""), Extreme(0.0, "")
    for row in ours:
        peers = [
            r
            for r in report.rows
            if r["algorithm"] != OURS and r["over cap %"] == 0 and same_setting(r, row)
        ]
        for model, sync in product(SHAPES, SYNCS):
            key = f"{model} {sync}"
            by = row[key] - max((peer[key] for peer in peers), default=0.0)
            case = f"{row['trace']} n={row['sequences']} {_case(row['budget'], row['ranks'], key)}"
            lead = min(lead, Extreme(by, case), key=_value)
            if row["ranks"] == 64 and by < 0:
                gap = max(gap, Extreme(row[f"{key} gap"], case), key=_value)
    name = f"lead over the best cap-holding peer, smallest ({lead.case})"
    report.check(name, lead.value, -TIE)
    if not quick:
        name = f"gap to bound at 64 ranks where a peer is ahead ({gap.case or 'nowhere'})"
        report.check(name, gap.value, 0.02, at_most=True)


def _hold_times(report: Report, ours: list[Row], quick: bool) -> None:
    slow = max((r for r in ours if r["sequences"] == 256), key=lambda r: r["plan ms"])
    case = f"{slow['trace']} budget={slow['budget']} ranks={slow['ranks']}"
    slowest = {
        "256 sequences, ms, slowest setting": (Extreme(slow["plan ms"], case), 5.0),
        "256 sequences that share prompts, ms, slowest": (slowest_shared_plan(quick), 5.0),
        "8,192 sequences, ms, slowest": (slowest_large_plan(quick), 100.0),
    }
    for name, (figure, bar) in slowest.items():
        title = f"plan of {name} ({figure.case})"
        report.check(title, figure.value, bar, at_most=True, clocked=True)


def slowest_large_plan(quick: bool) -> Extreme:
    """Milliseconds of 8,192 sequences: budgets longest and 16k, 8 and 64 ranks, both regimes."""
    slowest = Extreme(0.0, "")
    cost = CostModel.from_shape(SHAPES["7B"])
    for trace in TRACES[:1] if quick else TRACES:
        lengths = np.resize(read_lengths(trace), 8192)
        longest = int(lengths.max())
        caps = sorted({longest, max(longest, 16384)})
        for cap, ranks, sync in product(caps, _ranks(quick), SYNCS):
            _, spent = timed_plan(lengths, cap, ranks, sync, cost, runs=1 if quick else 3)
            case = f"{trace} {_case(cap, ranks, sync)}"
            slowest = max(slowest, Extreme(spent, case), key=_value)
    return slowest


def slowest_shared_plan(quick: bool) -> Extreme:
    """Milliseconds of 256 sequences in groups of 8 around one prompt, held once."""
    slowest = Extreme(0.0, "")
    cost = CostModel.from_shape(SHAPES["7B"])
    for trace, prompts, responses in _shared_batches(quick):
        lengths = prompts + responses
        longest = int(lengths.max())
        caps = sorted({longest, *(max(longest, b) for b in (8192, 16384, 65536))})
        options = {
            "groups": np.arange(256) // 8,
            "prompt_lengths": prompts,
            "share_prompts": True,
        }
        for cap, ranks, sync in product(caps, _ranks(quick), SYNCS):
            _, spent = timed_plan(lengths, cap, ranks, sync, cost, **options)
            case = f"{trace} {_case(cap, ranks, sync)}"
            slowest = max(slowest, Extreme(spent, case), key=_value)
    return slowest


def _shared_batches(quick: bool) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Trace, prompt lengths and response lengths of 256 sequences in groups of 8."""
    for trace in TRACES:
        parts = read_parts(trace)
        for first in range(0, 256 if quick else 768, 256):
            prompts = np.repeat(parts[first : first + 256 : 8, 0], 8)
            yield trace, prompts, parts[first : first + 256, 1]


def smallest_lead_held_out(quick: bool) -> Extreme:
    """Our efficiency less that of the best cap-holding peer where that is least, at 7B cost, on
    lengths that no setting has.
    """
    cost = CostModel.from_shape(SHAPES["7B"])
    smallest = Extreme(1.0, "")
    ranks_tried = (6,) if quick else (6, 16)
    cases = product(held_out((96,) if quick else (96, 320)), ranks_tried, (1.0, 1.5, 4.0))
    for (name, lengths), ranks, stretch in cases:
        cap = int(lengths.max() * stretch)
        perfect = float(cost(lengths).sum()) / ranks
        for sync, path in _best_peer_paths(lengths, cap, ranks, cost).items():
            made = plan(lengths, cap, ranks, sync, cost=cost)  # type: ignore[arg-type]
            case = f"{name} n={lengths.size} {_case(cap, ranks, sync)}"
            smallest = min(smallest, Extreme(made.efficiency - perfect / path, case), key=_value)
    return smallest


def _best_peer_paths(
    lengths: np.ndarray, cap: int, ranks: int, cost: CostModel
) -> dict[str, float]:
    """The shortest critical path of any peer that holds the cap, by regime."""
    best = dict.fromkeys(SYNCS, float("inf"))
    for name, algorithm in PEERS.items():
        micro_batches = algorithm(lengths, cap, ranks)
        most = max(int(lengths[b].sum()) for rank in micro_batches for b in rank if b.size)
        if name == STATIC or most > cap:
            continue
        by_sync = paths(micro_batches, lengths, cost, padded=False)
        for sync, path in zip(SYNCS, by_sync, strict=True):
            best[sync] = min(best[sync], path)
    return best


def _ranks(quick: bool) -> tuple[int, ...]:
    return (8,) if quick else (8, 64)


def _case(budget: Any, ranks: int, key: str) -> str:
    return f"budget={budget} ranks={ranks} {key}"


def _value(figure: Extreme) -> float:
    return figure.value
