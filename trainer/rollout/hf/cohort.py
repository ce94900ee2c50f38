"""Sequences that began together: their prompts' keys and values once per prompt, their own in step
with each other.

All rows of a cohort write the same column in a step, and unless cohorts were joined none looks at
pads. A row that ends gives its place to the last one; what is computed and read follows the living
rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.rollout.hf.network import Network
from trainer.rollout.hf.prefill import prefill
from trainer.rollout.hf.row import Row

GROW = 64
"""Least columns added when the cache is full."""
FORGET_BELOW = 0.75
"""Prompts whose rows have all ended are forgotten when at most this share of the prompts is still
needed.
"""


class Cohort:
    """Living ``rows`` and their cache. ``token`` and ``position`` int64 [rows]: what each feeds
    into the next step.
    """

    def __init__(self, network: Network, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.scale, self.length = network.scale, 0
        prefixes = list(dict.fromkeys(row.prefix for row in rows))
        number = {prefix: i for i, prefix in enumerate(prefixes)}
        self._prefix_of = [number[row.prefix] for row in rows]
        self._widths = [len(p) for p in prefixes]
        self._starts = [0] * len(self.rows)
        """The first column of each row's own tokens; one at least has 0."""
        self.prompt_tokens = sum(self._widths)
        device = network.device
        self.position = torch.tensor([len(row.prefix) for row in rows], device=device)
        self.token = torch.empty(0)
        logits, self.prefix = prefill(network, prefixes)
        """By layer: keys and values [prompts, kv_heads, longest prompt, head_dim]."""
        shape = (len(rows), network.kv_heads, GROW, network.head_dim)
        like = self.prefix[0][0]
        self.own = [(like.new_empty(shape), like.new_empty(shape)) for _ in self.prefix]
        """By layer: keys and values [at least the rows, kv_heads, capacity, head_dim], filled up to
        ``length``.
        """
        self._arrange()
        self.first_logits: Tensor | None = logits[torch.tensor(self._prefix_of, device=device)]
        """[rows, vocabulary]: for the first token."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token of each row, the newest, over its prompt and its own tokens; see
        :data:`network.Attend`.
        """
        rows, heads, head_dim = query.shape
        own_keys, own_values = self._own(layer)
        own_keys[:rows, :, self.length], own_values[:rows, :, self.length] = key, value
        seen = self.length + 1
        kv_heads, prompts, slots = key.shape[1], len(self._widths), self._slots
        grouped = (query * self.scale).view(rows, kv_heads, -1, head_dim)
        each = heads // kv_heads
        keys, values = self.prefix[layer]
        width = keys.shape[2]

        # All rows of a prompt read its keys and values together: [prompts, kv_heads, slots * each,
        # ...].
        def gathered(x: Tensor) -> Tensor:
            spread = x if self._row_of is None else x.index_select(0, self._row_of)
            by_prompt = spread.view(prompts, slots, kv_heads, each, -1).transpose(1, 2)
            return by_prompt.reshape(prompts, kv_heads, slots * each, -1)

        def scattered(x: Tensor) -> Tensor:
            by_slot = x.view(prompts, kv_heads, slots, each, -1).transpose(1, 2)
            flat = by_slot.reshape(prompts * slots, kv_heads, each, -1)
            return flat if self._slot_of is None else flat.index_select(0, self._slot_of)

        to_prompt = gathered(grouped) @ keys.transpose(2, 3)
        if self._pads is not None:
            to_prompt.add_(self._pads)
        to_own = grouped @ own_keys[:rows, :, :seen].transpose(2, 3)
        if self._early is not None:
            to_own[..., : self._early.shape[-1]].masked_fill_(self._early, -torch.inf)
        shares = torch.cat([scattered(to_prompt), to_own], dim=-1)
        shares = shares.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
        out = shares[..., width:] @ own_values[:rows, :, :seen]
        out += scattered(gathered(shares[..., :width]) @ values)
        return out.view(rows, heads, head_dim)

    def advance(self, token: Tensor) -> None:
        """Take note of the tokens int64 [rows] drawn behind what the cache holds."""
        if self.first_logits is None:
            self.length += 1
            self.position += 1
        self.first_logits, self.token = None, token

    def drop(self, ended: Sequence[int]) -> None:
        """Forget these rows (ascending); the last ones take their places."""
        gone, left = set(ended), len(self.rows) - len(ended)
        holes = [i for i in ended if i < left]
        movers = [i for i in range(left, len(self.rows)) if i not in gone]
        order = list(range(left))
        for hole, mover in zip(holes, movers, strict=True):
            order[hole] = mover
        self.rows = [self.rows[i] for i in order]
        self._prefix_of = [self._prefix_of[i] for i in order]
        self._starts = [self._starts[i] for i in order]
        if not left:
            return
        device = self.position.device
        if holes:
            to, source = torch.tensor(holes, device=device), torch.tensor(movers, device=device)
            for slab in (x for layer in self.own for x in layer) if self.length else ():
                slab[to, :, : self.length] = slab[source, :, : self.length]
        kept = torch.tensor(order, device=device)
        self.position, self.token = self.position[kept], self.token[kept]
        if len(set(self._prefix_of)) <= FORGET_BELOW * len(self._widths):
            self._forget()
        if first := min(self._starts):
            self.own = [(k[:, :, first:], v[:, :, first:]) for k, v in self.own]
            self.length -= first
            self._starts = [start - first for start in self._starts]
        self._arrange()

    def pads(self, other: Cohort) -> int:
        """Cells of the cache, each a token of a row or prompt, that would be padding if ``other``
        were absorbed.
        """
        mine, theirs = max(self._widths), max(other._widths)
        narrow = len(self._widths) if mine < theirs else len(other._widths)
        return len(other.rows) * (self.length - other.length) + narrow * abs(mine - theirs)

    def absorb(self, other: Cohort) -> None:
        """Take over the rows of a cohort that is not older. Their tokens end in the same column as
        those of the rows here, and columns before their first are never looked at.
        """
        rows, late = len(self.rows), self.length - other.length
        for layer, ((k, v), (more_k, more_v)) in enumerate(zip(self.own, other.own, strict=True)):
            pairs = ((k[:rows], more_k[: len(other.rows)]), (v[:rows], more_v[: len(other.rows)]))
            keys, values = (_below(a, b, self.length, late, other.length, GROW) for a, b in pairs)
            self.own[layer] = keys, values
        width, theirs = (c.prefix[0][0].shape[2] for c in (self, other))
        most = max(width, theirs)
        for layer, (mine, more) in enumerate(zip(self.prefix, other.prefix, strict=True)):
            keys, values = (
                _below(a, b, width, 0, theirs, most - width)
                for a, b in zip(mine, more, strict=True)
            )
            self.prefix[layer] = keys, values
        self._prefix_of += [len(self._widths) + i for i in other._prefix_of]
        self._widths += other._widths
        self._starts += [start + late for start in other._starts]
        self.rows += other.rows
        self.position = torch.cat([self.position, other.position])
        self.token = torch.cat([self.token, other.token])
        self._arrange()

    def _own(self, layer: int) -> tuple[Tensor, Tensor]:
        """The slabs of a layer, with room for one more column."""
        keys, values = self.own[layer]
        if self.length == keys.shape[2]:
            keys, values = (self._wider(x) for x in (keys, values))
            self.own[layer] = keys, values
        return keys, values

    def _wider(self, slab: Tensor) -> Tensor:
        rows, columns = len(self.rows), slab.shape[2]
        wide = slab.new_empty(rows, slab.shape[1], columns + max(GROW, columns // 2), slab.shape[3])
        wide[:, :, :columns] = slab[:rows]
        return wide

    def _forget(self) -> None:
        """Drop the prompts that no row needs."""
        needed = sorted(set(self._prefix_of))
        width = max(self._widths[i] for i in needed)
        kept = torch.tensor(needed, device=self.position.device)
        self.prefix = [
            (k[:, :, :width].index_select(0, kept), v[:, :, :width].index_select(0, kept))
            for k, v in self.prefix
        ]
        self._widths = [self._widths[i] for i in needed]
        new = {old: i for i, old in enumerate(needed)}
        self._prefix_of = [new[i] for i in self._prefix_of]

    def _arrange(self) -> None:
        """Give each row a slot behind its prompt: ``_slots`` to a prompt, ``_slot_of`` [rows],
        ``_row_of`` [prompts * slots] (an empty slot repeats row 0). Both None when row i has slot
        i.
        """
        device, prompts = self.position.device, len(self._widths)
        self._slots = max(Counter(self._prefix_of).values())
        used = [0] * prompts
        slot_of = []
        for prefix in self._prefix_of:
            slot_of.append(prefix * self._slots + used[prefix])
            used[prefix] += 1
        self._slot_of: Tensor | None = None
        self._row_of: Tensor | None = None
        if slot_of != list(range(prompts * self._slots)):
            row_of = [0] * (prompts * self._slots)
            for row, slot in enumerate(slot_of):
                row_of[slot] = row
            self._slot_of, self._row_of = (
                torch.tensor(slot_of, device=device),
                torch.tensor(row_of, device=device),
            )
        self._early: Tensor | None = None
        if last := max(self._starts):
            starts = torch.tensor(self._starts, device=device)
            self._early = (torch.arange(last, device=device) < starts[:, None])[:, None, None]
        like, width = self.prefix[0][0], self.prefix[0][0].shape[2]
        self._pads: Tensor | None = None
        if min(self._widths) < width:
            widths = torch.tensor(self._widths, device=device)
            beyond = torch.arange(width, device=device) >= widths[:, None]
            self._pads = like.new_zeros(prompts, width).masked_fill_(beyond, -torch.inf)[
                :, None, None
            ]


def _below(upper: Tensor, lower: Tensor, filled: int, start: int, count: int, room: int) -> Tensor:
    """``upper`` [rows, heads, columns, head_dim], filled up to column ``filled``, and below it,
    from column ``start``, the first ``count`` columns of ``lower``; ``room`` more columns. What
    nothing is written to is 0.
    """
    rows = len(upper)
    both = upper.new_zeros(rows + len(lower), upper.shape[1], filled + room, upper.shape[3])
    both[:rows, :, :filled] = upper[:, :, :filled]
    both[rows:, :, start : start + count] = lower[:, :, :count]
    return both
