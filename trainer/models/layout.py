"""What one micro-batch sends through the model: flat tokens, where documents begin, and which
log-probs are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainer.data.batch import Batch


class Segment(NamedTuple):
    """A run of tokens in the flat row that attends causally to itself and, when it has one, to all
    of its prefix.
    """

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class Layout:
    """The segments of a packed row, in order and without gaps. ``plans`` caches what a backend
    derives from them.
    """

    segments: tuple[Segment, ...]
    plans: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return sum(s.length for s in self.segments)


@dataclass(frozen=True)
class Packed:
    """One forward pass. ``input_ids`` and ``position_ids`` int64 [1, tokens] packed, [sequences,
    longest] padded.

    ``sources`` int64 [targets]: flat row whose hidden state predicts the target; ``target_ids``
    int64 [targets]: its token; ``targets`` int64 [targets]: its place in the batch's flat columns,
    ascending.
    """

    input_ids: Tensor
    position_ids: Tensor
    sources: Tensor
    target_ids: Tensor
    targets: Tensor
    layout: Layout | None
    """None for a padded batch."""
    attention_mask: Tensor | None
    """bool [sequences, longest] for a padded batch, None for a packed one."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the model computes, pads included and a shared prompt once."""
        return int(self.input_ids.numel())

    def to(self, device: torch.device | str) -> Packed:
        """The same with its tensors on ``device``; ``targets`` stay with the batch's columns."""
        return replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            sources=self.sources.to(device, non_blocking=True),
            target_ids=self.target_ids.to(device, non_blocking=True),
            attention_mask=None
            if self.attention_mask is None
            else self.attention_mask.to(device, non_blocking=True),
        )


def pack(batch: Batch, *, share_prompts: bool = False, all_tokens: bool = False) -> Packed:
    """Lay the sequences end to end; with ``share_prompts`` sequences of one group hold their prompt
    once.

    Targets are the tokens whose ``loss_mask`` is True (without that column, or with ``all_tokens``:
    all of them) but never the first of a sequence. Prompts are shared when both ``groups`` and the
    prompts' tokens are equal. A batch without sequences becomes one token without targets, so that
    every rank still runs a forward and backward pass.
    """
    wanted = _target_mask(batch, all_tokens)
    if len(batch) == 0:
        zero = torch.zeros(1, 1, dtype=torch.int64)
        none = torch.zeros(0, dtype=torch.int64)
        return Packed(zero, zero, none, none, none, Layout((Segment(0, 1),)), None)
    if (
        share_prompts
        and len(batch) > 1
        and "groups" in batch.rows
        and "prompt_lengths" in batch.rows
    ):
        tokens, rows, positions, segments = _shared(batch)
    else:
        tokens, rows, positions, segments = _plain(batch)
    ids = batch.columns["input_ids"]
    targets = wanted.nonzero().flatten()
    return Packed(
        input_ids=ids[tokens][None],
        position_ids=positions[None],
        sources=rows[targets - 1],
        target_ids=ids[targets],
        targets=targets,
        layout=Layout(segments),
        attention_mask=None,
    )


def pad(batch: Batch, *, to: int | None = None, all_tokens: bool = False) -> Packed:
    """The padded form [sequences, ``to`` or the longest] of the same targets: the baseline that
    packing is held to.
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


def _plain(batch: Batch) -> tuple[Tensor, Tensor, Tensor, tuple[Segment, ...]]:
    """Flat places of the row's tokens, row of each flat place, positions and segments."""
    everything = torch.arange(batch.num_tokens)
    positions = everything - torch.repeat_interleave(batch.cu_seqlens[:-1], batch.lengths)
    starts, lengths = batch.cu_seqlens[:-1].tolist(), batch.lengths.tolist()
    segments = tuple(Segment(s, n) for s, n in zip(starts, lengths, strict=True) if n)
    return everything, everything, positions, segments


def _shared(batch: Batch) -> tuple[Tensor, Tensor, Tensor, tuple[Segment, ...]]:
    """As :func:`_plain`, a prompt followed by all of its responses, the prompts in order of first
    appearance.
    """
    starts, lengths = batch.cu_seqlens[:-1].tolist(), batch.lengths.tolist()
    prompts, groups = batch.rows["prompt_lengths"].tolist(), batch.rows["groups"].tolist()
    ids = batch.columns["input_ids"].numpy()
    members: dict[tuple[int, bytes], list[int]] = {}
    for i, (start, prompt) in enumerate(zip(starts, prompts, strict=True)):
        members.setdefault((groups[i], ids[start : start + prompt].tobytes()), []).append(i)
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    segments: list[Segment] = []
    rows = torch.empty(batch.num_tokens, dtype=torch.int64)
    at = 0

    def lay(first: int, count: int, position: int, prefix: tuple[int, int]) -> None:
        nonlocal at
        tokens.append(torch.arange(first, first + count))
        positions.append(torch.arange(position, position + count))
        segments.append(Segment(at, count, *prefix))
        rows[first : first + count] = torch.arange(at, at + count)
        at += count

    for sequences in members.values():
        if len(sequences) == 1 or prompts[sequences[0]] == 0:
            for i in sequences:
                if lengths[i]:
                    lay(starts[i], lengths[i], 0, (0, 0))
            continue
        prompt, prompt_at = prompts[sequences[0]], at
        lay(starts[sequences[0]], prompt, 0, (0, 0))
        for i in sequences:
            rows[starts[i] : starts[i] + prompt] = torch.arange(prompt_at, prompt_at + prompt)
            if lengths[i] > prompt:
                lay(starts[i] + prompt, lengths[i] - prompt, prompt, (prompt_at, prompt))
    return torch.cat(tokens), rows, torch.cat(positions), tuple(segments)
