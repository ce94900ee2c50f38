"""The samples that a run will meet, looked at before it begins: a bad row is heard of at once, not
hours later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from time import monotonic

from trainer.base.errors import UserError
from trainer.data.dataset import Dataset
from trainer.data.forked import ordered_map

SPAN = 64
"""Samples that a process looks at in one go."""
LIMIT_S = 60.0
"""Seconds after which a run begins all the same."""


def require_sound(
    dataset: Dataset,
    indices: Sequence[int],
    *,
    num_workers: int = 0,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = monotonic,
) -> int:
    """Read and tokenize these samples, in this order, ``num_workers`` processes at a time, until
    ``limit_s`` seconds have gone; how many were looked at.

    Raises UserError for the one with the lowest index that can't be trained on, with the number of
    all such ones.
    """

    def look(span: Sequence[int]) -> list[tuple[int, str]]:
        found = []
        for index in span:
            try:
                dataset[index]
            except UserError as error:
                found.append((index, str(error)))
        return found

    spans = [indices[at : at + SPAN] for at in range(0, len(indices), SPAN)]
    end, looked, faults = clock() + limit_s, 0, list[tuple[int, str]]()
    with closing(
        ordered_map(look, spans, num_workers=min(num_workers, len(spans)), name="data check")
    ) as parts:
        for span, part in zip(spans, parts, strict=False):
            faults += part
            looked += len(span)
            if clock() >= end:
                break
    if faults:
        more = f" ({len(faults)} of {looked} rows can't be trained on; this is the first)"
        raise UserError(min(faults)[1] + (more if len(faults) > 1 else ""))
    return looked
