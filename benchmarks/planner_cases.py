"""What the planner's benchmark plans: settings of real lengths, and lengths held out of them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from statistics import median
from time import process_time
from typing import Any

import numpy as np

from benchmarks.harness import length_trace
from trainer.base.model_shape import ModelShape
from trainer.batching import CostModel, Plan, plan

SHAPES = {
    "7B": ModelShape(hidden=3584, layers=28, heads=28, kv_heads=4, ffn=18944, vocab=152064),
    "0.5B": ModelShape(
        hidden=896, layers=24, heads=14, kv_heads=2, ffn=4864, vocab=151936, tied=True
    ),
}
TRACES = ("gsm8k_train", "gsm8k_test_model_solutions", "search_r1_qwen2.5_7b", "intern_s1_math")
LONGEST = "longest"


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    trace: str
    sequences: int
    budget: int | str
    """Tokens, or ``longest``: the longest sequence of the trace."""
    ranks: int

    def cap(self, lengths: np.ndarray) -> int:
        """Tokens of a micro-batch."""
        return int(lengths.max()) if self.budget == LONGEST else int(self.budget)


def settings(quick: bool) -> list[Setting]:
    """All settings of the table, or those of ``--quick``."""
    out = []
    for trace in TRACES:
        for sequences in (256,) if quick else (256, 2048):
            for ranks in (8,) if quick else (8, 64):
                budgets: tuple[int | str, ...] = (LONGEST, 8192, 16384, 32768, 65536)
                out += [Setting(trace, sequences, budget, ranks) for budget in budgets]
    return out


def read_parts(trace: str) -> np.ndarray:
    """Tokens of prompt and response, [sequences, 2]."""
    with length_trace(trace).open() as file:
        return np.array(
            [(int(r["prompt_len"]), int(r["response_len"])) for r in csv.DictReader(file)]
        )


def read_lengths(trace: str) -> np.ndarray:
    """Tokens of each sequence, [sequences]."""
    return read_parts(trace).sum(1)


def held_out(sizes: tuple[int, ...], seed: int = 20) -> list[tuple[str, np.ndarray]]:
    """Lengths that no setting of the table has: shuffled traces and synthetic ones."""
    rng = np.random.default_rng(seed)
    out = [(trace, rng.permutation(read_lengths(trace))[:n]) for trace in TRACES for n in sizes]
    for n in sizes:
        out.append(("lognormal", np.minimum(32768, rng.lognormal(6, 1, n).astype(int) + 1)))
        short = rng.integers(50, 400, n)
        out.append(("bimodal", np.where(rng.random(n) < 0.2, rng.integers(3000, 6000, n), short)))
        out.append(("uniform", rng.integers(200, 4000, n)))
        out.append(("all equal", np.full(n, 777)))
        out.append(("one giant", np.append(short[1:], 20000)))
    return out


def timed_plan(
    lengths: np.ndarray,
    cap: int,
    ranks: int,
    sync: Any,
    cost: CostModel,
    runs: int = 5,
    **options: Any,
) -> tuple[Plan, float]:
    """The plan, and the median of the processor time of ``runs`` runs in milliseconds."""
    times = []
    for _ in range(runs):
        began = process_time()
        made = plan(lengths, cap, ranks, sync, cost=cost, **options)
        times.append((process_time() - began) * 1e3)
    return made, median(times)
