"""Rows of the planner's benchmark: efficiency by setting and algorithm, means over batches."""

from __future__ import annotations

from statistics import fmean
from time import process_time
from typing import Any

import numpy as np

from benchmarks.peers import PEERS, MicroBatches
from benchmarks.planner_cases import SHAPES, Setting, timed_plan
from trainer.batching import CostModel
from trainer.batching.bounds import bins_bound

OURS = "Plimsoll"
STATIC = "static, padded, 4 each"
Row = dict[str, Any]


def paths(
    micro_batches: MicroBatches, lengths: np.ndarray, cost: CostModel, *, padded: bool
) -> tuple[float, float]:
    """Critical paths (micro, step) of micro-batches."""
    most = max(len(rank) for rank in micro_batches)
    loads = np.zeros((len(micro_batches), most))
    for r, rank in enumerate(micro_batches):
        for k, members in enumerate(rank):
            if members.size and padded:
                loads[r, k] = float(cost([lengths[members].max()])[0]) * members.size
            elif members.size:
                loads[r, k] = float(cost(lengths[members]).sum())
    return float(loads.max(0).sum()), float(loads.sum(1).max())


def measure(setting: Setting, lengths: np.ndarray, batches: int) -> list[Row]:
    """One row per algorithm, means over at most ``batches`` batches of ``lengths`` [sequences]."""
    cap, n = setting.cap(lengths), setting.sequences
    costs = {name: CostModel.from_shape(shape) for name, shape in SHAPES.items()}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in (*PEERS, OURS)}
    for first in range(0, min(lengths.size // n, batches) * n, n):
        batch = lengths[first : first + n]
        fewest_bins = max(bins_bound(batch, cap), 1)
        for name in PEERS:
            measured[name].append(_peer(name, setting, batch, cap, costs, fewest_bins))
        measured[OURS].append(_ours(setting, batch, cap, costs, fewest_bins))
    bound = {
        key: fmean(row.pop(key) for row in measured[OURS])
        for key in [key for key in measured[OURS][0] if "bound of" in key]
    }
    rows = []
    for name, values in measured.items():
        mean = {key: fmean(row[key] for row in values) for key in values[0]}
        mean["plan ms"] = max(row["plan ms"] for row in values)
        gaps = {
            f"{key} gap": bound[f"bound of {key}"] / mean[key] - 1.0
            for key in (f"{model} {sync}" for model in SHAPES for sync in ("micro", "step"))
        }
        rows.append({**vars(setting), "algorithm": name, **mean, **gaps})
    return rows


def _peer(
    name: str,
    setting: Setting,
    lengths: np.ndarray,
    cap: int,
    costs: dict[str, CostModel],
    fewest_bins: int,
) -> dict[str, float]:
    """The row of a peer's algorithm on one batch."""
    began = process_time()
    micro_batches = PEERS[name](lengths, cap, setting.ranks)
    row = {"plan ms": (process_time() - began) * 1e3}
    padded = name == STATIC
    tokens = []
    for members in (part for rank in micro_batches for part in rank if part.size):
        real = int(lengths[members].sum())
        tokens.append(int(lengths[members].max()) * members.size if padded else real)
    row["over cap %"] = 100.0 * sum(t > cap for t in tokens) / len(tokens)
    row["bins / bound"] = len(tokens) / fewest_bins
    for model, cost in costs.items():
        perfect = float(cost(lengths).sum()) / setting.ranks
        micro, step = paths(micro_batches, lengths, cost, padded=padded)
        row[f"{model} micro"] = perfect / micro
        row[f"{model} step"] = perfect / step
    return row


def _ours(
    setting: Setting,
    lengths: np.ndarray,
    cap: int,
    costs: dict[str, CostModel],
    fewest_bins: int,
) -> dict[str, float]:
    """Our row on one batch, with the bounds of its efficiencies."""
    row: dict[str, float] = {}
    over = 0
    count = 0
    bins = 0
    times = []
    for model, cost in costs.items():
        for sync in ("micro", "step"):
            made, milliseconds = timed_plan(lengths, cap, setting.ranks, sync, cost)
            tokens = [t for rank in made.tokens for t in rank if t]
            over += sum(t > cap for t in tokens)
            count += len(tokens)
            if (model, sync) == ("7B", "micro"):
                bins = len(tokens)
            times.append(milliseconds)
            row[f"{model} {sync}"] = made.efficiency
            row[f"bound of {model} {sync}"] = min(1.0, made.efficiency * (1.0 + made.gap))
    return {
        "plan ms": max(times),
        "over cap %": 100.0 * over / count,
        "bins / bound": bins / fewest_bins,
        **row,
    }


def same_setting(a: Row, b: Row) -> bool:
    """Whether two rows are of one setting."""
    return all(a[k] == b[k] for k in ("trace", "budget", "sequences", "ranks"))


def summary(rows: list[Row]) -> list[Row]:
    """One line per setting at 7B: ours, the best peer that holds the cap, and the best-known
    trainer's cap.
    """
    out = []
    for ours in (r for r in rows if r["algorithm"] == OURS):
        others = [r for r in rows if same_setting(r, ours) and r["algorithm"] != OURS]
        holding = [r for r in others if r["over cap %"] == 0]
        best_micro = max(holding, key=lambda r: r["7B micro"])
        verl = next(r for r in others if r["algorithm"] == "verl <= 0.8: KK + KK")
        line = {
            "trace": ours["trace"][:24],
            "seqs": ours["sequences"],
            "budget": str(ours["budget"]),
            "ranks": ours["ranks"],
            "micro": ours["7B micro"],
            "best peer": best_micro["7B micro"],
            "which": best_micro["algorithm"].split(":")[0],
            "step": ours["7B step"],
            "best step peer": max(r["7B step"] for r in holding),
            "gap": ours["7B micro gap"],
            "bins/bound": ours["bins / bound"],
            "verl<=0.8 over cap %": verl["over cap %"],
            "ms": ours["plan ms"],
        }
        out.append(line)
    return out
