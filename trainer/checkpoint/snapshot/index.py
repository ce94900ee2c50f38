"""Which bytes of which file hold which fragment: restoring reads this instead of unpickling."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from trainer.checkpoint.snapshot.fragments import (
    EXTRA,
    MASTER,
    WEIGHT,
    Fragment,
    dtype_name,
    fragments,
    full_shapes,
    zero_stage,
)
from trainer.checkpoint.snapshot.torch_file import TorchFile

MAX_NESTED = 8
"""Saved tensors may nest in memory (a flat group and its first tensor): so many are looked at."""


class _Span(NamedTuple):
    """A saved tensor: its live memory and where its bytes lie in a file."""

    address: int
    nbytes: int
    path: str
    offset: int
    device: str


class IndexWriter:
    """Makes the index of one rank; looks the tensors up anew only when they have moved."""

    def __init__(
        self, ds: Any, rank: int, extra_tensors: Mapping[str, Tensor], *, include_untrained: bool
    ) -> None:
        self._ds = ds
        self._rank = rank
        self._extra_tensors = extra_tensors
        self._include_untrained = include_untrained
        self._spans: list[_Span] = []
        self._rows = "[]"

    def encode(self, files: Mapping[str, TorchFile], counters: Mapping[str, int]) -> bytes:
        """The index as JSON: fragments, and on rank 0 the full shapes; ``counters`` as given."""
        spans = [
            _Span(
                record.tensor.data_ptr(),
                record.nbytes,
                path,
                record.offset,
                str(record.tensor.device),
            )
            for path, file in files.items()
            for record in file.tensors
            if record.nbytes and record.tensor.is_contiguous()
        ]
        if spans != self._spans:
            self._rows = json.dumps(self._find_rows(sorted(spans)))
            self._spans = spans
        shapes = {}
        if self._rank == 0:
            shapes = {name: list(shape) for name, shape in full_shapes(self._ds).items()}
        rest = json.dumps({"shapes": shapes, "counters": counters})
        return f'{{"fragments": {self._rows}, {rest[1:]}'.encode()

    def _find_rows(self, spans: list[_Span]) -> list[list[Any]]:
        """[name, kind, start, numel, dtype, file, offset] of each fragment; ``spans`` are sorted.

        Raises RuntimeError when a fragment is in no file of any rank.
        """
        wanted = fragments(self._ds, include_untrained=self._include_untrained)
        for name, tensor in self._extra_tensors.items():
            wanted.append(Fragment(name, EXTRA, 0, tensor.detach().view(-1)))
        addresses = [span.address for span in spans]
        rows: list[list[Any]] = []
        missing = []
        for fragment in wanted:
            location = _locate(fragment, spans, addresses)
            if location is None:
                missing.append(fragment)
            else:
                dtype = dtype_name(fragment.tensor)
                rows.append(
                    [
                        fragment.name,
                        fragment.kind,
                        fragment.start,
                        fragment.numel,
                        dtype,
                        *location,
                    ]
                )
        saved = {(row[0], row[1]) for row in rows}
        for fragment in missing:
            if not _is_saved_elsewhere(fragment, saved, self._rank, zero_stage(self._ds)):
                raise RuntimeError(
                    f"DeepSpeed's checkpoint lacks {fragment.kind} of {fragment.name}: this "
                    "version is unknown"
                )
        return rows


def _locate(fragment: Fragment, spans: list[_Span], addresses: list[int]) -> tuple[str, int] | None:
    """The file with the fragment's bytes and their offset; None when no span contains it."""
    start = fragment.tensor.data_ptr()
    end = start + fragment.nbytes
    device = str(fragment.tensor.device)
    last = bisect_right(addresses, start)
    for span in reversed(spans[max(0, last - MAX_NESTED - 1) : last]):
        if end <= span.address + span.nbytes and device == span.device:
            return span.path, span.offset + start - span.address
    return None


def _is_saved_elsewhere(
    fragment: Fragment, saved: set[tuple[str, str]], rank: int, stage: int
) -> bool:
    """Whether another rank, or the weight's master copy, holds the same elements."""
    if fragment.kind == WEIGHT:
        if rank > 0 and stage < 3:
            return True
        if (fragment.name, MASTER) in saved:
            return True
    return stage == 0 and rank > 0 and fragment.kind != EXTRA
