"""Runs side by side: one row for each setting, the best one and the Pareto front marked. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jobs.view.curves import Curves, lower_is_better, value_of
from jobs.view.settings import Settings, is_seed, without_seed

THROUGHPUT = ("perf/throughput", "perf/tokens_per_second")
MEMORY = ("perf/max_memory_allocated_gb", "perf/cpu_memory_used_gb")
BEST = "best"
PARETO = "pareto"
DIVERGED = "diverged"
NO_STEPS = "no steps"


@dataclass(frozen=True)
class Value:
    """A metric of a row: over its seeds."""

    mean: float
    """Of the finite values; NaN or infinite when none is."""
    std: float | None
    """Sample standard deviation (n - 1); None for a single finite value."""
    not_finite: int
    count: int

    @property
    def text(self) -> str:
        """``0.71 ± 0.02``, and how many seeds are not finite."""
        shown = f"{self.mean:.6g}"
        if self.std is not None:
            shown = f"{self.mean:.4g} ± {self.std:.2g}"
        if self.not_finite and self.count > 1:
            shown += f" ({self.not_finite} nan/inf)"
        return shown


@dataclass(frozen=True)
class Row:
    """Runs that differ only in the seed."""

    runs: Sequence[str]
    """Their names."""
    settings: Settings
    """What differs between rows; of a single run also its seed."""
    values: Mapping[str, Value]
    steps: int | None
    """The newest step that all of them have; None when one has none."""
    marks: Sequence[str] = field(default=())

    @property
    def name(self) -> str:
        """The first run, and how many there are."""
        if len(self.runs) == 1:
            return self.runs[0]
        return f"{self.runs[0]} x{len(self.runs)}"


def make_rows(
    names: Sequence[str],
    settings: Sequence[Settings],
    curves: Sequence[Curves],
    metrics: Sequence[str],
    *,
    axis: str,
    at: float | None,
    how: str,
    by_seed: bool,
) -> list[Row]:
    """The rows in the order of their first runs, not marked yet.

    ``by_seed``: runs that differ only in the seed are one row.
    """
    groups: dict[object, list[int]] = {}
    for number, one in enumerate(settings):
        seeded = by_seed and any(is_seed(key) for key in one)
        groups.setdefault(without_seed(one) if seeded else number, []).append(number)
    rows = []
    for members in groups.values():
        chosen = settings[members[0]]
        if len(members) > 1:
            chosen = dict(without_seed(chosen))
        values = {}
        for metric in metrics:
            numbers = [value_of(curves[n], metric, axis, at, how) for n in members]
            known = [number for number in numbers if number is not None]
            if known:
                values[metric] = summarise(known)
        ends = [curves[n].last_step for n in members]
        marks = []
        if any(curves[n].diverged for n in members):
            marks.append(DIVERGED)
        if all(end is None for end in ends):
            marks.append(NO_STEPS)
        known_ends = [end for end in ends if end is not None]
        steps = min(known_ends) if len(known_ends) == len(ends) else None
        rows.append(Row([names[n] for n in members], chosen, values, steps, marks))
    return rows


def summarise(numbers: Sequence[float]) -> Value:
    """Mean and sample standard deviation of at least one number."""
    finite = [number for number in numbers if math.isfinite(number)]
    mean = statistics.fmean(finite) if finite else numbers[0]
    std = statistics.stdev(finite) if len(finite) > 1 else None
    return Value(mean, std, len(numbers) - len(finite), len(numbers))


def marked(rows: Sequence[Row], judged_by: str) -> list[Row]:
    """The rows with the best one by the metric ``judged_by`` and the Pareto front of throughput
    against memory marked. A row with a diverged run is never the best one.
    """
    best = _best(rows, judged_by)
    front = pareto_front([(_first(row, THROUGHPUT), _first(row, MEMORY)) for row in rows])
    if len(rows) < 2:
        return list(rows)
    result = []
    for number, row in enumerate(rows):
        marks = list(row.marks)
        if number in front:
            marks.insert(0, PARETO)
        if number == best:
            marks.insert(0, BEST)
        result.append(Row(row.runs, row.settings, row.values, row.steps, marks))
    return result


def pareto_front(pairs: Sequence[tuple[float | None, float | None]]) -> set[int]:
    """Numbers of the pairs (more is better, less is better) that no other pair beats in one and
    equals at least in the other. Pairs that lack a finite value are left out.
    """
    order = [
        (-first, second, number)
        for number, (first, second) in enumerate(pairs)
        if first is not None and second is not None and math.isfinite(first + second)
    ]
    front: set[int] = set()
    least = math.inf
    kept: tuple[float, float] | None = None
    for negative, second, number in sorted(order):
        if second < least or (negative, second) == kept:
            front.add(number)
            least = second
            kept = (negative, second)
    return front


def in_order(rows: Sequence[Row], key: str) -> list[Row]:
    """The rows by a metric, the best first, or by a setting; rows without it last."""
    if any(key in row.values for row in rows):
        sign = 1 if lower_is_better(key) else -1
        return sorted(rows, key=lambda row: _rank(row, key, sign))
    return sorted(rows, key=lambda row: _number_or_text(row.settings.get(key, "")))


def _best(rows: Sequence[Row], metric: str) -> int | None:
    sign = 1 if lower_is_better(metric) else -1
    ranked = [
        (sign * row.values[metric].mean, number)
        for number, row in enumerate(rows)
        if metric in row.values
        and DIVERGED not in row.marks
        and math.isfinite(row.values[metric].mean)
    ]
    return min(ranked)[1] if ranked else None


def _rank(row: Row, metric: str, sign: int) -> tuple[int, float]:
    value = row.values.get(metric)
    if value is None or not math.isfinite(value.mean):
        return 1 + (value is None), 0.0
    return 0, sign * value.mean


def _number_or_text(text: str) -> tuple[int, float, str]:
    try:
        number = float(text)
    except ValueError:
        return 1, 0.0, text
    return 0, number, ""


def _first(row: Row, names: Sequence[str]) -> float | None:
    return next((row.values[name].mean for name in names if name in row.values), None)
