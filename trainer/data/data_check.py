"""A check of the samples that a run will meet, before it begins: a bad row is an error at once, not
hours later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from time import monotonic

from trainer.base.errors import UserError
from trainer.base.forked import ordered_map
from trainer.data.dataset import Dataset

SPAN = 64
"""Samples that a process checks per request."""
LIMIT_S = 60.0
"""Seconds after which the run begins although samples are unchecked."""


def check_samples(
    dataset: Dataset,
    indices: Sequence[int],
    *,
    num_workers: int = 0,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = monotonic,
) -> int:
    """Read and tokenize the samples at ``indices`` with ``num_workers`` processes, for at most
    ``limit_s`` seconds. Returns how many were checked.

    Raises UserError for the one with the lowest index that can't be trained on, with the number of
    all of them.
    """

    def check(span: Sequence[int]) -> list[tuple[int, str]]:
        faults = []
        for index in span:
            try:
                dataset[index]
            except UserError as error:
                faults.append((index, str(error)))
        return faults

    deadline = clock() + limit_s
    checked = 0
    faults: list[tuple[int, str]] = []
    spans = [indices[start : start + SPAN] for start in range(0, len(indices), SPAN)]
    workers = min(num_workers, len(spans))
    with closing(ordered_map(check, spans, num_workers=workers, name="data check")) as parts:
        for span, part in zip(spans, parts, strict=False):
            faults += part
            checked += len(span)
            if clock() >= deadline:
                break
    if faults:
        more = f" ({len(faults)} of {checked} rows can't be trained on; this is the first)"
        raise UserError(min(faults)[1] + (more if len(faults) > 1 else ""))
    return checked
