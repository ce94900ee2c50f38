"""A check of the samples that a run will meet, before it begins: a bad row is an error at once, not
hours later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic

from trainer.base.errors import UserError
from trainer.base.forked import ordered_map
from trainer.data.dataset import Dataset

SPAN = 64
"""Samples that a process checks per request."""
LIMIT_S = 60.0
"""Seconds after which the run begins although samples are unchecked."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What a check has seen."""

    samples: int
    """Samples that were looked at."""
    cut_prompts: int = 0
    """Of them: prompts cut to ``data.max_prompt_length``."""
    cut_responses: int = 0
    """Of them: responses cut to ``data.max_response_length``."""


@dataclass(kw_only=True)
class _Span:
    """What a process found in its samples."""

    faults: list[tuple[int, str]]
    """(index, message) of samples that can't be trained on."""
    cut_prompts: int = 0
    cut_responses: int = 0


def check_samples(
    dataset: Dataset,
    indices: Sequence[int],
    *,
    num_workers: int = 0,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = monotonic,
) -> Checked:
    """Read and tokenize the samples at ``indices`` with ``num_workers`` processes, for at most
    ``limit_s`` seconds.

    Raises UserError for the one with the lowest index that can't be trained on, with the number of
    all of them.
    """

    def check(span: Sequence[int]) -> _Span:
        seen = _Span(faults=[])
        for index in span:
            try:
                example = dataset[index]
            except UserError as error:
                seen.faults.append((index, str(error)))
            else:
                seen.cut_prompts += example.cut_prompt
                seen.cut_responses += example.cut_response
        return seen

    deadline = clock() + limit_s
    checked = 0
    seen: list[_Span] = []
    spans = [indices[start : start + SPAN] for start in range(0, len(indices), SPAN)]
    workers = min(num_workers, len(spans))
    with closing(ordered_map(check, spans, num_workers=workers, name="data check")) as parts:
        for span, part in zip(spans, parts, strict=False):
            seen.append(part)
            checked += len(span)
            if clock() >= deadline:
                break
    faults = [fault for part in seen for fault in part.faults]
    if faults:
        more = f" ({len(faults)} of {checked} rows can't be trained on; this is the first)"
        raise UserError(min(faults)[1] + (more if len(faults) > 1 else ""))
    return Checked(
        samples=checked,
        cut_prompts=sum(part.cut_prompts for part in seen),
        cut_responses=sum(part.cut_responses for part in seen),
    )
