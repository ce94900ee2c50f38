"""What a sequence costs: floating-point operations from the shape of the model, seconds after
calibration.

No torch here: a login node predicts with it, a worker plans with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder-only transformer that decide its cost. All sizes are counts of
    features or layers.
    """

    hidden: int
    """Width of the residual stream."""
    layers: int
    """Decoder layers."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; fewer than ``heads`` under grouped-query attention."""
    ffn: int
    """Width of the dense feed-forward layer (three matrices, gated)."""
    vocab: int
    """Rows of the output projection."""
    head_dim: int = 0
    """Features of a head; 0 means ``hidden / heads``."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts that one token visits."""
    moe_ffn: int = 0
    """Width of one expert; 0 means ``ffn``."""
    shared_experts: int = 0
    """Experts that every token visits besides the routed ones."""
    dense_layers: int = 0
    """Layers of a mixture-of-experts model that keep the dense feed-forward layer."""
    tied: bool = False
    """Output projection shared with the embedding. Saves memory, not operations."""

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def linear_params_per_layer(self) -> tuple[int, int]:
        """Weights one token is multiplied with in a dense and in a mixture-of-experts layer."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (q + 2 * kv) + q * self.hidden
        dense = attention + 3 * self.hidden * self.ffn
        if not self.experts:
            return dense, dense
        visited = self.experts_per_token + self.shared_experts
        router = self.hidden * self.experts
        return dense, attention + router + 3 * self.hidden * (self.moe_ffn or self.ffn) * visited

    @property
    def active_params(self) -> int:
        """Weights that take part in the products of one token, output projection included,
        embedding lookup not.
        """
        dense, moe = self.linear_params_per_layer
        kept = self.layers if not self.experts else min(self.dense_layers, self.layers)
        return kept * dense + (self.layers - kept) * moe + self.hidden * self.vocab

    @property
    def params(self) -> int:
        """All weights of the products and the embedding (norms and biases left out)."""
        q, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (q + 2 * kv) + q * self.hidden
        dense = attention + 3 * self.hidden * self.ffn
        held = self.experts + self.shared_experts
        moe = (
            attention
            + self.hidden * self.experts
            + 3 * self.hidden * (self.moe_ffn or self.ffn) * held
        )
        kept = self.layers if not self.experts else min(self.dense_layers, self.layers)
        embeddings = self.hidden * self.vocab * (1 if self.tied else 2)
        return kept * dense + (self.layers - kept) * moe + embeddings


@dataclass(frozen=True)
class CostModel:
    """``cost(L) = linear * L + quadratic * L**2`` of one sequence, plus ``overhead`` per
    micro-batch.

    The unit is the maker's: floating-point operations from :meth:`from_shape`, seconds from
    :func:`trainer.batching.calibrate.calibrate`. Only ratios matter to the planner.
    """

    linear: float = 1.0
    quadratic: float = 0.0
    overhead: float = 0.0
    unit: str = "tokens"

    @classmethod
    def from_shape(
        cls,
        shape: ModelShape,
        *,
        training: bool = True,
        recompute: bool = False,
        frozen: bool = False,
    ) -> CostModel:
        """Operations of ``shape``: 2 per weight and token in the forward pass, and ``2 * heads *
        head_dim * L**2`` a layer for causal attention (scores and values, half of the square). The
        backward pass costs twice the forward pass (Kaplan et al. 2020, arXiv:2001.08361, section
        2.1); recomputation adds one forward pass more. Half of the weights' backward pass is their
        own gradient, which ``frozen`` ones (LoRA) don't have.
        """
        passes = (3.0 + (1.0 if recompute else 0.0)) if training else 1.0
        attention = 2.0 * shape.layers * shape.heads * shape.head_size
        own_gradient = 1.0 if training and frozen else 0.0
        return cls(
            (passes - own_gradient) * 2.0 * shape.active_params, passes * attention, 0.0, "FLOPs"
        )

    def __call__(self, lengths: Sequence[int] | Ints | Floats) -> Floats:
        """Cost of each sequence alone; float64 [sequences]."""
        n = np.asarray(lengths, dtype=np.float64)
        return self.linear * n + self.quadratic * n * n

    def responses(self, lengths: Ints, prompts: Ints) -> Floats:
        """Cost of the response parts when the prompt is computed elsewhere; float64 [sequences].

        A response attends to prompt and response, so its share of the square is ``L**2 - P**2``.
        """
        return self(lengths) - self(prompts)

    @property
    def ratio(self) -> float:
        """Tokens at which attention costs as much as everything else; infinite without a quadratic
        term.
        """
        return self.linear / self.quadratic if self.quadratic else float("inf")


TOKENS = CostModel()
"""Every token costs 1: the cost model of those who know no better."""
