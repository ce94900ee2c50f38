"""A ragged batch: flat token columns, per-sequence rows and cu_seqlens. There is no padded copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Batch:
    """Sequences laid end to end.

    ``cu_seqlens`` int64 [sequences + 1]; ``columns`` name -> [tokens]; ``rows`` name ->
    [sequences]. A column's value at a token belongs to *that* token (its log-prob given the tokens
    before it, its advantage): the first token of a sequence has no log-prob and holds 0. Each phase
    attaches the columns that it computes and drops those that no later phase reads.

    Columns in use: ``input_ids`` int64, ``loss_mask`` bool (True on trained tokens),
    ``old_log_probs``, ``ref_log_probs``, ``rollout_log_probs``, ``advantages``, ``returns``,
    ``values`` float32. Rows in use: ``prompt_lengths`` int64, ``groups`` int64 (sequences of one
    prompt share it), ``rewards`` float32, ``ids`` int64.
    """

    cu_seqlens: Tensor
    columns: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def from_sequences(
        cls, columns: Mapping[str, Sequence[Tensor]], rows: dict[str, Tensor] | None = None
    ) -> Batch:
        """Join one tensor per sequence to flat columns [tokens].

        Raises ValueError unless all columns have equal lengths per sequence.
        """
        lengths: list[int] | None = None
        for name, parts in columns.items():
            sizes = [int(p.numel()) for p in parts]
            if lengths is not None and sizes != lengths:
                raise ValueError(
                    f"column {name!r} has other lengths per sequence than the columns before it"
                )
            lengths = sizes
        cu = torch.zeros(len(lengths or []) + 1, dtype=torch.int64)
        if lengths:
            cu[1:] = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
        return cls(
            cu,
            {name: torch.cat(list(parts)) for name, parts in columns.items() if len(parts)},
            dict(rows or {}),
        )

    def __len__(self) -> int:
        return int(self.cu_seqlens.numel()) - 1

    @property
    def lengths(self) -> Tensor:
        """int64 [sequences], in tokens."""
        return self.cu_seqlens.diff()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self.cu_seqlens[-1])

    def token_index(self, indices: Tensor) -> Tensor:
        """Indices int64 [tokens of the sequences] into the flat columns, of the tokens of sequences
        ``indices`` int64 [n].
        """
        starts = self.cu_seqlens[:-1][indices]
        lengths = self.lengths[indices]
        ends = lengths.cumsum(0)
        within = torch.arange(int(ends[-1]) if len(indices) else 0) - torch.repeat_interleave(
            ends - lengths, lengths
        )
        return torch.repeat_interleave(starts, lengths) + within

    def select(self, indices: Sequence[int] | Tensor) -> Batch:
        """A batch of the sequences at ``indices`` int64 [n], in that order."""
        idx = torch.as_tensor(indices, dtype=torch.int64)
        flat = self.token_index(idx)
        cu = torch.zeros(len(idx) + 1, dtype=torch.int64)
        cu[1:] = self.lengths[idx].cumsum(0)
        return Batch(
            cu,
            {k: v[flat] for k, v in self.columns.items()},
            {k: v[idx] for k, v in self.rows.items()},
        )

    @classmethod
    def concat(cls, batches: Sequence[Batch]) -> Batch:
        """The sequences of all ``batches`` in order, which must have the same columns and rows."""
        lengths = torch.cat([b.lengths for b in batches])
        cu = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        cu[1:] = lengths.cumsum(0)
        return cls(
            cu,
            {k: torch.cat([b.columns[k] for b in batches]) for k in batches[0].columns},
            {k: torch.cat([b.rows[k] for b in batches]) for k in batches[0].rows},
        )

    def drop(self, *names: str) -> None:
        """Remove columns or rows that no later phase reads."""
        for name in names:
            self.columns.pop(name, None)
            self.rows.pop(name, None)
