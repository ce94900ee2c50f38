"""One rank's share of a checkpoint as images of its files in a host buffer: captured in the
training thread, laid out and filled in the background while the weights rest.
"""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint.snapshot import capture, state
from trainer.checkpoint.snapshot.fragments import (
    BESIDE,
    WEIGHT,
    Fragment,
    fragments,
    shapes,
    zero_stage,
)
from trainer.checkpoint.snapshot.host_buffer import HostBuffer
from trainer.checkpoint.snapshot.torch_file import Archive, lay_out
from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.writer.progress import Filled

CHUNK = 16 << 20
NICENESS = 10
TELL_EVERY = 64 << 20
"""Bytes after which the writer is told that there is more."""
COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""Of DeepSpeed's engine."""
BESIDE_FILE = "state/beside.pt"
_PAGE = 4096
Span = tuple[int, int, str, int, str]
"""A saved tensor: address, bytes, file, offset in it, device."""


@dataclass(frozen=True)
class Copy:
    """``source`` (flat, contiguous, live) goes to bytes [offset, offset + nbytes) of the buffer."""

    source: Tensor
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.source.numel() * self.source.element_size()


@dataclass
class Plan:
    """Files one after the other in the buffer, each from a page boundary on."""

    files: list[FileSpec] = field(default_factory=list)
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    size: int = 0

    def add_bytes(self, path: str, data: bytes) -> None:
        """A file that is ready."""
        start = self._open(path, len(data))
        self.pieces.append((start, data))

    def add_archive(self, path: str, archive: Archive, instead: Mapping[int, Tensor]) -> None:
        """A torch file whose tensors are still to be copied; ``instead`` of those at some
        addresses, others.
        """
        start = self._open(path, archive.size)
        self.pieces += [(start + offset, data) for offset, data in archive.pieces]
        for leaf in archive.leaves:
            if leaf.nbytes:
                tensor = instead.get(leaf.tensor.data_ptr(), leaf.tensor)
                self.copies.append(Copy(tensor.contiguous().view(-1), start + leaf.offset))

    def _open(self, path: str, length: int) -> int:
        start = self.size
        self.files.append(FileSpec(path, start, length))
        self.size = -(-(start + length) // _PAGE) * _PAGE
        return start


def tag_of(step: int) -> str:
    """Name of DeepSpeed's folder inside ``step_N``."""
    return f"global_step{step}"


@dataclass(frozen=True)
class Captured:
    """What one save is of, and copies of what training may change before the next optimizer
    step.
    """

    step: int
    states: dict[str, Any]
    """DeepSpeed's state dicts, with live tensors."""
    own: dict[str, bytes]
    """Our own states, by path."""
    counters: dict[str, int]
    buffers: dict[int, Tensor]
    """The modules' buffers as they were, by the address of the live one: a forward pass may change
    them.
    """


class Planner:
    """Plans the files of one rank of ``ds``. Where the tensors lie is looked up anew only when they
    have moved.

    ``beside``: more tensors by name, the same on every rank; rank 0 saves them. They too rest until
    they are copied. ``frozen``: save weights that are not trained, too.
    """

    def __init__(
        self, ds: Any, rank: int, beside: Mapping[str, Tensor] | None = None, *, frozen: bool = True
    ) -> None:
        self._ds, self._rank, self._frozen = ds, rank, frozen
        self._capturer = capture.Capturer(ds, frozen=frozen)
        self._beside = dict(beside or {}) if rank == 0 else {}
        self._spans: list[Span] = []
        self._places = "[]"

    def capture(
        self, step: int, rank_state: dict[str, Any], global_state: dict[str, Any]
    ) -> Captured:
        """What has to be done in the training thread. Collective."""
        own = {f"state/rank_{self._rank}.safetensors": state.encode(rank_state)}
        if self._rank == 0:
            own |= {
                "state/global.safetensors": state.encode(global_state),
                "latest": tag_of(step).encode(),
            }
            own |= capture.scripts()
        states = self._capturer.capture(tag_of(step))
        if self._beside:
            states[BESIDE_FILE] = self._beside
        return Captured(
            step,
            states,
            own,
            {name: getattr(self._ds, name) for name in COUNTERS},
            {b.data_ptr(): b.detach().clone() for b in self._capturer.buffers()},
        )

    def plan(self, captured: Captured) -> Plan:
        """All files of this rank. In any thread, while the weights rest; the tensors' contents are
        not touched yet.
        """
        archives = {path: lay_out(states) for path, states in captured.states.items()}
        plan = Plan()
        for path, data in captured.own.items():
            plan.add_bytes(path, data)
        plan.add_bytes(f"state/index_{self._rank}.json", self._index(archives, captured.counters))
        for path, archive in archives.items():
            plan.add_archive(path, archive, captured.buffers)
        return plan

    def _index(self, archives: dict[str, Archive], counters: dict[str, int]) -> bytes:
        """Where each fragment's bytes lie: what restoring reads instead of unpickling anything."""
        spans = [
            (leaf.tensor.data_ptr(), leaf.nbytes, path, leaf.offset, str(leaf.tensor.device))
            for path, archive in archives.items()
            for leaf in archive.leaves
            if leaf.nbytes and leaf.tensor.is_contiguous()
        ]
        if spans != self._spans:
            held = fragments(self._ds, frozen=self._frozen)
            self._places = json.dumps(
                _rows(self._ds, self._rank, held, sorted(spans), self._beside)
            )
            self._spans = spans
        full = (
            {name: list(shape) for name, shape in shapes(self._ds).items()}
            if self._rank == 0
            else {}
        )
        rest = json.dumps({"shapes": full, "counters": counters})
        return f'{{"fragments": {self._places}, {rest[1:]}'.encode()


def fill(plan: Plan, buffer: HostBuffer, filled: Filled, stream: Any = None) -> None:
    """Copy everything into ``buffer``, in its order. On a GPU through a side stream; on the CPU in
    this thread, without the GIL and at a priority lowered for good: so it takes what the step that
    is running leaves.
    """
    with torch.cuda.stream(stream):  # its device too: this is a new thread
        buffer.grow(plan.size)
    whole = buffer.data.numpy()
    for offset, data in plan.pieces:
        whole[offset : offset + len(data)] = np.frombuffer(data, np.uint8)
    if stream is not None:
        with torch.cuda.stream(stream):
            for copy in plan.copies:
                target = buffer.data[copy.offset : copy.offset + copy.nbytes]
                target.copy_(copy.source.view(torch.uint8), non_blocking=True)
        stream.synchronize()
        filled.advance(plan.size)
        return
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    told = 0
    for copy in plan.copies:
        source = copy.source.view(torch.uint8).numpy()
        # numpy copies in one thread: torch would wake its pool and take cores away from the step
        # that is running.
        for first in range(0, copy.nbytes, CHUNK):
            piece = source[first : first + CHUNK]
            whole[copy.offset + first : copy.offset + first + len(piece)] = piece
            if copy.offset + first - told >= TELL_EVERY:
                told = copy.offset + first + len(piece)
                filled.advance(told)
    filled.advance(plan.size)


def _rows(
    ds: Any, rank: int, held: list[Fragment], spans: list[Span], beside: Mapping[str, Tensor]
) -> list[list[Any]]:
    """Each fragment of ``held`` and ``beside`` and its place in a file, from the sorted
    ``spans``.
    """
    starts = [span[0] for span in spans]
    rows, missing = [], []
    more = [Fragment(name, BESIDE, 0, tensor.detach().view(-1)) for name, tensor in beside.items()]
    for fragment in [*held, *more]:
        place = _place(fragment, spans, starts)
        if place is None:
            missing.append(fragment)
        else:
            rows.append(
                [
                    fragment.name,
                    fragment.kind,
                    fragment.start,
                    fragment.numel,
                    _dtype(fragment.tensor),
                    *place,
                ]
            )
    _require_complete(ds, rank, rows, missing)
    return rows


def _place(fragment: Fragment, spans: list[Span], starts: list[int]) -> tuple[str, int] | None:
    pointer, nbytes = fragment.tensor.data_ptr(), fragment.numel * fragment.tensor.element_size()
    number = bisect_right(starts, pointer) - 1
    # Leaves may nest (a flat group and its first tensor): the nearest few that begin before it.
    for begin, length, path, offset, device in reversed(spans[max(0, number - 8) : number + 1]):
        if pointer + nbytes <= begin + length and device == str(fragment.tensor.device):
            return path, offset + pointer - begin
    return None


def _require_complete(ds: Any, rank: int, rows: list[list[Any]], missing: list[Fragment]) -> None:
    """A fragment may be left out only if another rank, or its master copy, holds the same."""
    have = {(row[0], row[1]) for row in rows}
    stage = zero_stage(ds)
    for fragment in missing:
        if fragment.kind == WEIGHT and (
            (rank > 0 and stage < 3) or (fragment.name, "fp32") in have
        ):
            continue
        if stage == 0 and rank > 0 and fragment.kind != BESIDE:
            continue
        raise RuntimeError(
            f"DeepSpeed's checkpoint lacks {fragment.kind} of {fragment.name}: this version is "
            "unknown"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
