"""What a sequence costs: floating-point operations from the shape of the model, seconds after
calibration.

No torch here: a login node predicts with it, a worker plans with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainer.base.model_shape import ModelShape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
"""Every token costs 1: the cost model where nothing is known of the model."""
