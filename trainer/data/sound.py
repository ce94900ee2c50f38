"""The samples that a run will meet, looked at before it begins: a bad row met later costs the steps before it."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.data.dataset import Dataset
from trainer.data.forked import ordered_map
from trainer.errors import UserError

SPAN = 64
"""Samples that a process looks at in one go."""


def require_sound(dataset: Dataset, indices: Sequence[int], *, num_workers: int = 0) -> None:
    """Read and tokenize these samples, ``num_workers`` processes at a time.

    Raises UserError for the first that can't be trained on, with the number of all such ones.
    """

    def look(span: Sequence[int]) -> list[str]:
        found = []
        for index in span:
            try:
                dataset[index]
            except UserError as error:
                found.append(str(error))
        return found

    spans = [indices[at : at + SPAN] for at in range(0, len(indices), SPAN)]
    looked = ordered_map(look, spans, num_workers=min(num_workers, len(spans)), name="data check")
    faults = [text for part in looked for text in part]
    if faults:
        more = f" ({len(faults)} of {len(indices)} rows can't be trained on; this is the first)"
        raise UserError(faults[0] + (more if len(faults) > 1 else ""))
