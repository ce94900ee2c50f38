"""The input of one forward pass: flat tokens, the segments that attend to each other, and the
targets whose log-probs are computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.batch import Batch


class Segment(NamedTuple):
    """A span of tokens in the flat row. It attends causally to itself, and to all of its prefix if
    it has one.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class Layout:
    """The segments of a packed row, in order and without gaps."""

    segments: tuple[Segment, ...]
    plans: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Plans that attention backends derive from the segments, by backend."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return sum(s.length for s in self.segments)


@dataclass(frozen=True)
class Packed:
    """The input of one forward pass, packed or padded.

    ``input_ids`` and ``position_ids``: int64 [1, tokens] packed, [sequences, longest] padded.
    """

    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    """int64 [targets]: the index in the flat input whose hidden state predicts the target."""
    target_ids: Tensor
    """int64 [targets]: the target's token."""
    targets: Tensor
    """int64 [targets], ascending: the target's index in the batch's flat columns."""
    layout: Layout | None
    """None for a padded batch."""
    attention_mask: Tensor | None
    """bool [sequences, longest] for a padded batch, None for a packed one."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, including padding; a shared prompt counts once."""
        return int(self.input_ids.numel())

    def to(self, device: torch.device | str) -> Packed:
        """The same with its tensors on ``device``; ``targets`` stay with the batch's columns."""
        mask = self.attention_mask
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            sources=self.sources.to(device, non_blocking=True),
            target_ids=self.target_ids.to(device, non_blocking=True),
            attention_mask=None if mask is None else mask.to(device, non_blocking=True),
        )


def pack(batch: Batch, *, share_prompts: bool = False, all_tokens: bool = False) -> Packed:
    """Lay the sequences of ``batch`` end to end; with ``share_prompts`` a group's prompt once.

    Targets are the tokens whose ``loss_mask`` is True (all tokens without that column or with
    ``all_tokens``), except the first of a sequence. Prompts are shared when both ``groups`` and the
    prompts' tokens are equal. A batch without sequences becomes one token without targets, so that
    every rank still runs a forward and a backward pass.
    """
    if len(batch) == 0:
        zero = torch.zeros(1, 1, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        return Packed(zero, zero, none, none, none, Layout((Segment(0, 1),)), None)
    has_groups = "groups" in batch.rows and "prompt_lengths" in batch.rows
    if share_prompts and has_groups and len(batch) > 1:
        packing = _with_shared_prompts(batch)
    else:
        packing = _end_to_end(batch)
    ids = batch.columns["input_ids"]
    targets = _target_mask(batch, all_tokens).nonzero().flatten()
    return Packed(
        input_ids=ids[packing.tokens][None],
        position_ids=packing.positions[None],
        sources=packing.rows[targets - 1],
        target_ids=ids[targets],
        targets=targets,
        layout=Layout(packing.segments),
        attention_mask=None,
    )


def pad(batch: Batch, *, to: int | None = None, all_tokens: bool = False) -> Packed:
    """The padded form [sequences, ``to`` or the longest] of ``batch`` with the same targets: the
    baseline of packing. Raises ValueError when ``to`` is shorter than the longest sequence.
    """
    if len(batch) == 0:
        return pack(batch)
    lengths = batch.lengths
    width = int(lengths.max()) if to is None else to
    if width < int(lengths.max()):
        raise ValueError(f"cannot pad a sequence of {int(lengths.max())} tokens to {width}")
    mask = torch.arange(width) < lengths[:, None]
    ids = batch.columns["input_ids"]
    padded = ids.new_zeros(len(batch), width)
    padded[mask] = ids
    targets = _target_mask(batch, all_tokens).nonzero().flatten()
    rows = mask.flatten().nonzero().flatten()
    positions = torch.arange(width).expand(len(batch), width).contiguous()
    return Packed(padded, positions, rows[targets - 1], ids[targets], targets, None, mask)


def _target_mask(batch: Batch, all_tokens: bool) -> Tensor:
    mask = batch.columns.get("loss_mask")
    if mask is None or all_tokens:
        mask = torch.ones(batch.num_tokens, dtype=torch.bool)
    mask = mask.clone()
    starts = batch.cu_seqlens[:-1]
    mask[starts[batch.lengths > 0]] = False
    return mask


class _Packing(NamedTuple):
    """How the tokens of a batch lie in the packed row."""

    tokens: Tensor
    """int64 [row]: index in the batch's flat columns of each token of the row."""
    rows: Tensor
    """int64 [tokens]: index in the row of each token of the batch."""
    positions: Tensor
    """int64 [row]: position of each token in its sequence."""
    segments: tuple[Segment, ...]


def _end_to_end(batch: Batch) -> _Packing:
    """The sequences one after the other."""
    tokens = torch.arange(batch.num_tokens)
    positions = tokens - torch.repeat_interleave(batch.cu_seqlens[:-1], batch.lengths)
    starts = batch.cu_seqlens[:-1].tolist()
    lengths = batch.lengths.tolist()
    segments = tuple(Segment(s, n) for s, n in zip(starts, lengths, strict=True) if n)
    return _Packing(tokens, tokens, positions, segments)


def _with_shared_prompts(batch: Batch) -> _Packing:
    """Each prompt followed by all of its responses, the prompts in order of first appearance."""
    starts = batch.cu_seqlens[:-1].tolist()
    lengths = batch.lengths.tolist()
    prompts = batch.rows["prompt_lengths"].tolist()
    row = _RowBuilder(batch.num_tokens)
    for sequences in _same_prompt(batch).values():
        first = sequences[0]
        prompt = prompts[first]
        if len(sequences) == 1 or prompt == 0:
            for i in sequences:
                if lengths[i]:
                    row.append(starts[i], lengths[i])
            continue
        prompt_start = row.length
        row.append(starts[first], prompt)
        for i in sequences:
            row.place(starts[i], prompt, prompt_start)
            if lengths[i] > prompt:
                row.append(starts[i] + prompt, lengths[i] - prompt, prefix=(prompt_start, prompt))
    return row.packing()


def _same_prompt(batch: Batch) -> dict[tuple[int, bytes], list[int]]:
    """Sequences by group and prompt tokens."""
    starts = batch.cu_seqlens[:-1].tolist()
    prompts = batch.rows["prompt_lengths"].tolist()
    groups = batch.rows["groups"].tolist()
    ids = batch.columns["input_ids"].numpy()
    members: dict[tuple[int, bytes], list[int]] = {}
    for i, (start, prompt) in enumerate(zip(starts, prompts, strict=True)):
        key = (groups[i], ids[start : start + prompt].tobytes())
        members.setdefault(key, []).append(i)
    return members


class _RowBuilder:
    """Appends spans of a batch's flat columns to a packed row."""

    def __init__(self, num_tokens: int) -> None:
        self.length = 0
        self._tokens: list[Tensor] = []
        self._positions: list[Tensor] = []
        self._segments: list[Segment] = []
        self._rows = torch.empty(num_tokens, dtype=torch.int64)

    def append(self, start: int, length: int, *, prefix: tuple[int, int] = (0, 0)) -> None:
        """Append ``length`` tokens from ``start`` as a segment behind ``prefix`` (row, length)."""
        position = prefix[1]
        self._tokens.append(torch.arange(start, start + length))
        self._positions.append(torch.arange(position, position + length))
        self._segments.append(Segment(self.length, length, *prefix))
        self.place(start, length, self.length)
        self.length += length

    def place(self, start: int, length: int, row: int) -> None:
        """Record that ``length`` tokens from ``start`` lie in the row from index ``row`` on."""
        self._rows[start : start + length] = torch.arange(row, row + length)

    def packing(self) -> _Packing:
        return _Packing(
            torch.cat(self._tokens), self._rows, torch.cat(self._positions), tuple(self._segments)
        )
