"""Rows that began together and share one key/value cache.

The keys and values of a prompt are stored once, however many rows it has. All rows write the same
column of their own cache in a step; without merged cohorts no cell of it is padding. When a row
ends, the last row takes its place, so that only the cells of active rows are computed and read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.rollout.hf.decoder import Decoder
from trainer.rollout.hf.prefill import prefill
from trainer.rollout.hf.row import Row

GROW = 64
"""Least number of columns added when the cache is full."""
KEEP_PROMPTS_ABOVE = 0.75
"""Share of the prompts with active rows at or below which the other prompts are dropped."""


class Cohort:
    """Active ``rows`` and their cache.

    ``token`` and ``position`` int64 [rows]: the input of the next step.
    """

    def __init__(self, decoder: Decoder, rows: Sequence[Row]) -> None:
        """Run the prefill of ``rows``."""
        self.rows = list(rows)
        self.scale = decoder.scale
        self.length = 0
        """Columns of the rows' own cache that are filled."""
        prompts = list(dict.fromkeys(row.prefix for row in rows))
        number = {prompt: i for i, prompt in enumerate(prompts)}
        self._prompt_of = [number[row.prefix] for row in rows]
        self._prompt_lengths = [len(p) for p in prompts]
        self._starts = [0] * len(self.rows)
        """The first column of each row's own tokens; at least one is 0."""
        self.prompt_tokens = sum(self._prompt_lengths)
        device = decoder.device
        self.position = torch.tensor([len(row.prefix) for row in rows], device=device)
        self.token = torch.empty(0)
        logits, self.prompt_cache = prefill(decoder, prompts)
        """By layer: keys and values [prompts, kv_heads, longest prompt, head_dim]."""
        shape = (len(rows), decoder.kv_heads, GROW, decoder.head_dim)
        like = self.prompt_cache[0][0]
        self.row_cache = [(like.new_empty(shape), like.new_empty(shape)) for _ in self.prompt_cache]
        """By layer: keys and values [at least the rows, kv_heads, capacity, head_dim], filled up to
        ``length``.
        """
        self._assign_slots()
        self.first_logits: Tensor | None = logits[torch.tensor(self._prompt_of, device=device)]
        """[rows, vocabulary]: for the first token; None once it is sampled."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of each row's newest token to its prompt and its own tokens (``Attend``)."""
        rows, heads, head_dim = query.shape
        row_keys, row_values = self._row_cache(layer)
        row_keys[:rows, :, self.length] = key
        row_values[:rows, :, self.length] = value
        filled = self.length + 1
        kv_heads = key.shape[1]
        group = heads // kv_heads
        grouped = (query * self.scale).view(rows, kv_heads, group, head_dim)
        prompt_keys, prompt_values = self.prompt_cache[layer]
        width = prompt_keys.shape[2]
        prompt_scores = self._by_prompt(grouped) @ prompt_keys.transpose(2, 3)
        if self._prompt_mask is not None:
            prompt_scores.add_(self._prompt_mask)
        row_scores = grouped @ row_keys[:rows, :, :filled].transpose(2, 3)
        if self._unused is not None:
            row_scores[..., : self._unused.shape[-1]].masked_fill_(self._unused, -torch.inf)
        scores = torch.cat([self._by_row(prompt_scores, group), row_scores], dim=-1)
        probs = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        out = probs[..., width:] @ row_values[:rows, :, :filled]
        out += self._by_row(self._by_prompt(probs[..., :width]) @ prompt_values, group)
        return out.view(rows, heads, head_dim)

    def advance(self, token: Tensor) -> None:
        """Set the newly sampled tokens int64 [rows] as the input of the next step."""
        if self.first_logits is None:
            self.length += 1
            self.position += 1
        self.first_logits = None
        self.token = token

    def drop(self, ended: Sequence[int]) -> None:
        """Remove the rows ``ended`` (indices, ascending); the last rows take their places."""
        removed = set(ended)
        left = len(self.rows) - len(ended)
        holes = [i for i in ended if i < left]
        movers = [i for i in range(left, len(self.rows)) if i not in removed]
        order = list(range(left))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.rows = [self.rows[i] for i in order]
        self._prompt_of = [self._prompt_of[i] for i in order]
        self._starts = [self._starts[i] for i in order]
        if not left:
            return
        if holes and self.length:
            self._move_rows(movers, holes)
        kept = torch.tensor(order, device=self.position.device)
        self.position = self.position[kept]
        self.token = self.token[kept]
        if len(set(self._prompt_of)) <= KEEP_PROMPTS_ABOVE * len(self._prompt_lengths):
            self._drop_prompts()
        self._drop_unused_columns()
        self._assign_slots()

    def padding_if_merged(self, other: Cohort) -> int:
        """Cells of the cache, each for one token of a row or prompt, that would be padding if
        ``other`` were merged in.
        """
        width = max(self._prompt_lengths)
        other_width = max(other._prompt_lengths)
        narrow = self if width < other_width else other
        row_cells = len(other.rows) * (self.length - other.length)
        return row_cells + len(narrow._prompt_lengths) * abs(width - other_width)

    def merge(self, other: Cohort) -> None:
        """Take over the rows of ``other``, which did not begin earlier.

        Their tokens end in the same column as those of the rows here; the columns before their
        first token are masked.
        """
        rows = len(self.rows)
        other_rows = len(other.rows)
        offset = self.length - other.length
        for layer, (pair, other_pair) in enumerate(
            zip(self.row_cache, other.row_cache, strict=True)
        ):
            keys, values = (
                _stack(a[:rows], b[:other_rows], self.length, offset, other.length, GROW)
                for a, b in zip(pair, other_pair, strict=True)
            )
            self.row_cache[layer] = keys, values
        width = self.prompt_cache[0][0].shape[2]
        other_width = other.prompt_cache[0][0].shape[2]
        extra = max(width, other_width) - width
        for layer, (pair, other_pair) in enumerate(
            zip(self.prompt_cache, other.prompt_cache, strict=True)
        ):
            keys, values = (
                _stack(a, b, width, 0, other_width, extra)
                for a, b in zip(pair, other_pair, strict=True)
            )
            self.prompt_cache[layer] = keys, values
        self._prompt_of += [len(self._prompt_lengths) + i for i in other._prompt_of]
        self._prompt_lengths += other._prompt_lengths
        self._starts += [start + offset for start in other._starts]
        self.rows += other.rows
        self.position = torch.cat([self.position, other.position])
        self.token = torch.cat([self.token, other.token])
        self._assign_slots()

    def _by_prompt(self, x: Tensor) -> Tensor:
        """[rows, kv_heads, heads of a kv head, features] to [prompts, kv_heads, slots * heads of a
        kv head, features], so that all rows of a prompt read its keys and values together.
        """
        _, kv_heads, group, features = x.shape
        prompts = len(self._prompt_lengths)
        by_slot = x if self._row_of_slot is None else x.index_select(0, self._row_of_slot)
        by_prompt = by_slot.view(prompts, self._slots, kv_heads, group, features).transpose(1, 2)
        return by_prompt.reshape(prompts, kv_heads, self._slots * group, features)

    def _by_row(self, x: Tensor, group: int) -> Tensor:
        """The inverse of ``_by_prompt``; ``group``: heads of a kv head."""
        prompts, kv_heads, _, features = x.shape
        by_slot = x.view(prompts, kv_heads, self._slots, group, features).transpose(1, 2)
        flat = by_slot.reshape(prompts * self._slots, kv_heads, group, features)
        return flat if self._slot_of_row is None else flat.index_select(0, self._slot_of_row)

    def _row_cache(self, layer: int) -> tuple[Tensor, Tensor]:
        """The rows' keys and values of a layer, with room for one more column."""
        keys, values = self.row_cache[layer]
        if self.length == keys.shape[2]:
            keys = self._widened(keys)
            values = self._widened(values)
            self.row_cache[layer] = keys, values
        return keys, values

    def _widened(self, cache: Tensor) -> Tensor:
        rows = len(self.rows)
        columns = cache.shape[2]
        capacity = columns + max(GROW, columns // 2)
        wide = cache.new_empty(rows, cache.shape[1], capacity, cache.shape[3])
        wide[:, :, :columns] = cache[:rows]
        return wide

    def _move_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        device = self.position.device
        source = torch.tensor(sources, device=device)
        target = torch.tensor(targets, device=device)
        for layer in self.row_cache:
            for cache in layer:
                cache[target, :, : self.length] = cache[source, :, : self.length]

    def _drop_prompts(self) -> None:
        """Drop the prompts without active rows."""
        needed = sorted(set(self._prompt_of))
        width = max(self._prompt_lengths[i] for i in needed)
        kept = torch.tensor(needed, device=self.position.device)
        self.prompt_cache = [
            (k[:, :, :width].index_select(0, kept), v[:, :, :width].index_select(0, kept))
            for k, v in self.prompt_cache
        ]
        self._prompt_lengths = [self._prompt_lengths[i] for i in needed]
        new_number = {old: new for new, old in enumerate(needed)}
        self._prompt_of = [new_number[i] for i in self._prompt_of]

    def _drop_unused_columns(self) -> None:
        """Drop the columns before the first token of all rows."""
        first = min(self._starts)
        if first:
            self.row_cache = [(k[:, :, first:], v[:, :, first:]) for k, v in self.row_cache]
            self.length -= first
            self._starts = [start - first for start in self._starts]

    def _assign_slots(self) -> None:
        """Give each row a slot of its prompt, and make the masks.

        ``_slots``: slots per prompt. ``_slot_of_row`` [rows] and ``_row_of_slot`` [prompts *
        slots], where an empty slot repeats row 0; both None when row i has slot i.
        """
        self._slots = max(Counter(self._prompt_of).values())
        used = [0] * len(self._prompt_lengths)
        slot_of_row = []
        for prompt in self._prompt_of:
            slot_of_row.append(prompt * self._slots + used[prompt])
            used[prompt] += 1
        self._slot_of_row: Tensor | None = None
        self._row_of_slot: Tensor | None = None
        total = len(self._prompt_lengths) * self._slots
        if slot_of_row != list(range(total)):
            row_of_slot = [0] * total
            for row, slot in enumerate(slot_of_row):
                row_of_slot[slot] = row
            device = self.position.device
            self._slot_of_row = torch.tensor(slot_of_row, device=device)
            self._row_of_slot = torch.tensor(row_of_slot, device=device)
        self._unused = self._unused_columns()
        self._prompt_mask = self._padded_prompt_mask()

    def _unused_columns(self) -> Tensor | None:
        """bool [rows, 1, 1, columns]: columns before the first token of a row; None without any."""
        last = max(self._starts)
        if last == 0:
            return None
        device = self.position.device
        starts = torch.tensor(self._starts, device=device)
        return (torch.arange(last, device=device) < starts[:, None])[:, None, None]

    def _padded_prompt_mask(self) -> Tensor | None:
        """[prompts, 1, 1, longest prompt], -inf behind a prompt's end; None for equal lengths."""
        like = self.prompt_cache[0][0]
        width = like.shape[2]
        if min(self._prompt_lengths) == width:
            return None
        lengths = torch.tensor(self._prompt_lengths, device=like.device)
        padding = torch.arange(width, device=like.device) >= lengths[:, None]
        mask = like.new_zeros(padding.shape).masked_fill_(padding, -torch.inf)
        return mask[:, None, None]


def _stack(upper: Tensor, lower: Tensor, filled: int, start: int, count: int, room: int) -> Tensor:
    """The first ``filled`` columns of ``upper`` [rows, heads, columns, head_dim] above the first
    ``count`` columns of ``lower``, which begin at column ``start``; ``room`` more columns follow.
    Other cells are 0.
    """
    rows = len(upper)
    both = upper.new_zeros(rows + len(lower), upper.shape[1], filled + room, upper.shape[3])
    both[:rows, :, :filled] = upper[:, :, :filled]
    both[rows:, :, start : start + count] = lower[:, :, :count]
    return both
