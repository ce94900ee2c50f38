"""Sequences that began together: their prompts' keys and values once per prompt, their own in step with each other.

All rows of a cohort have drawn equally many tokens, so a step writes one column and no row looks at pads. A row that
ends gives its place to the last one; what is computed and read follows the living rows.
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
"""Prompts whose rows have all ended are forgotten when at most this share of the prompts is still needed."""


class Cohort:
    """Living ``rows`` and their cache. ``token`` and ``position`` int64 [rows]: what each feeds into the next step."""

    def __init__(self, network: Network, rows: Sequence[Row]) -> None:
        self.rows = list(rows)
        self.scale, self.length = network.scale, 0
        prefixes = list(dict.fromkeys(row.prefix for row in rows))
        number = {prefix: i for i, prefix in enumerate(prefixes)}
        self._prefix_of = [number[row.prefix] for row in rows]
        self._widths = [len(p) for p in prefixes]
        self.prompt_tokens = sum(self._widths)
        device = network.device
        self.position = torch.tensor([len(row.prefix) for row in rows], device=device)
        self.token = torch.empty(0)
        logits, self.prefix = prefill(network, prefixes)
        """By layer: keys and values [prompts, kv_heads, longest prompt, head_dim]."""
        shape = (len(rows), network.kv_heads, GROW, network.head_dim)
        like = self.prefix[0][0]
        self.own = [(like.new_empty(shape), like.new_empty(shape)) for _ in self.prefix]
        """By layer: keys and values [at least the rows, kv_heads, capacity, head_dim], filled up to ``length``."""
        self._arrange()
        self.first_logits: Tensor | None = logits[torch.tensor(self._prefix_of, device=device)]
        """[rows, vocabulary]: for the first token."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One token of each row, the newest, over its prompt and its own tokens; see :data:`network.Attend`."""
        rows, heads, head_dim = query.shape
        own_keys, own_values = self._own(layer)
        own_keys[:rows, :, self.length], own_values[:rows, :, self.length] = key, value
        seen = self.length + 1
        kv_heads, prompts, slots = key.shape[1], len(self._widths), self._slots
        grouped = (query * self.scale).view(rows, kv_heads, -1, head_dim)
        each = heads // kv_heads
        keys, values = self.prefix[layer]
        width = keys.shape[2]

        # All rows of a prompt read its keys and values together: [prompts, kv_heads, slots * each, ...].
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
            (k[:, :, :width].index_select(0, kept), v[:, :, :width].index_select(0, kept)) for k, v in self.prefix
        ]
        self._widths = [self._widths[i] for i in needed]
        new = {old: i for i, old in enumerate(needed)}
        self._prefix_of = [new[i] for i in self._prefix_of]

    def _arrange(self) -> None:
        """Give each row a slot behind its prompt: ``_slots`` to a prompt, ``_slot_of`` [rows], ``_row_of`` [prompts *
        slots] (an empty slot repeats row 0). Both None when row i has slot i.
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
            self._slot_of, self._row_of = torch.tensor(slot_of, device=device), torch.tensor(row_of, device=device)
        like, width = self.prefix[0][0], self.prefix[0][0].shape[2]
        self._pads: Tensor | None = None
        if min(self._widths) < width:
            widths = torch.tensor(self._widths, device=device)
            beyond = torch.arange(width, device=device) >= widths[:, None]
            self._pads = like.new_zeros(prompts, width).masked_fill_(beyond, -torch.inf)[:, None, None]
