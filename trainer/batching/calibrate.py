"""The cost model fitted to measured times: robust least squares over micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from trainer.batching.cost import CostModel, Floats

EVIDENCE = 10.0
"""What a further coefficient has to lower the information criterion by: very strong evidence (Kass,
Raftery 1995).
"""
CANDIDATES = [
    ([0], 0.0),
    ([2], EVIDENCE / 2),
    ([0, 2], EVIDENCE),
    ([0, 1], EVIDENCE),
    ([0, 1, 2], 2 * EVIDENCE),
]
"""Free coefficients, of tokens, squares and overhead, and their price."""
NOISE = 1e-4
"""Relative noise of measured times: a fit with smaller errors needs no further coefficient."""


@dataclass(frozen=True)
class Calibration:
    """A cost model in seconds, and how well it explains the measured times."""

    cost: CostModel
    error: float
    """Median of |predicted - measured| / measured over the micro-batches."""
    samples: int

    def metrics(self, predicted: CostModel) -> dict[str, float]:
        """The coefficients for the log.

        The break-even is the number of tokens at which attention costs as much as the rest.
        """
        return {
            "cost/us_per_token": self.cost.linear * 1e6,
            "cost/ps_per_token_squared": self.cost.quadratic * 1e12,
            "cost/overhead_ms": self.cost.overhead * 1e3,
            "cost/relative_error": self.error,
            "cost/break_even_tokens_measured": self.cost.ratio if self.cost.quadratic else 0.0,
            "cost/break_even_tokens_predicted": predicted.ratio if predicted.quadratic else 0.0,
        }


def calibrate(tokens: ArrayLike, squares: ArrayLike, seconds: ArrayLike) -> Calibration | None:
    """Fit ``seconds = linear * tokens + quadratic * squares + overhead`` with no negative
    coefficient.

    All three are [micro-batches]: tokens held, sum of squared lengths (:meth:`Plan.squares`) and
    measured seconds. Errors are relative, and Huber's weights (k = 1.345 robust deviations; Huber
    1964) keep a stalled micro-batch from bending the curve. A coefficient is only taken in where it
    explains clearly more: micro-batches of one size can't tell attention, or overhead, from what
    grows with the tokens. None until three micro-batches of two different sizes are known.
    """
    columns = [np.asarray(x, np.float64).reshape(-1) for x in (tokens, squares, seconds)]
    measured = np.stack(columns, axis=1)
    valid = (measured[:, 0] > 0) & (measured[:, 2] > 0) & np.isfinite(measured[:, 2])
    measured = measured[valid]
    if len(measured) < 3 or np.unique(measured[:, 0]).size < 2:
        return None
    features = np.append(measured[:, :2], np.ones((len(measured), 1)), axis=1) / measured[:, 2:]
    scale = np.abs(features).max(axis=0)
    features = features / scale
    weights = np.ones(len(measured))
    fit = np.zeros(3)
    for _ in range(20):
        new = _simplest(features, weights)
        errors = np.abs(features @ new - 1.0)
        spread = 1.4826 * float(np.median(errors))
        done = bool(np.allclose(new, fit, rtol=1e-6, atol=0.0))
        fit = new
        if done or spread < 1e-12:
            break
        weights = np.minimum(1.0, 1.345 * spread / np.maximum(errors, 1e-300))
    linear, quadratic, overhead = (float(x) for x in fit / scale)
    error = float(np.median(np.abs(features @ fit - 1.0)))
    return Calibration(CostModel(linear, quadratic, overhead, "seconds"), error, len(measured))


def _simplest(features: Floats, weights: Floats) -> Floats:
    """Weighted least squares of ``features @ x = 1`` over x >= 0, with the free coefficients of the
    lowest Bayesian information criterion (Schwarz 1978).
    """
    root = np.sqrt(weights)
    best, lowest = np.zeros(3), np.inf
    for free, price in CANDIDATES:
        part = features[:, free] * root[:, None]
        x, _, rank, _ = np.linalg.lstsq(part, root, rcond=None)
        if (x < 0).any() or rank < len(free):
            continue
        mean_square = float(((part @ x - root) ** 2).mean())
        criterion = len(root) * float(np.log(mean_square + NOISE**2)) + price
        if criterion < lowest:
            lowest = criterion
            best = np.zeros(3)
            best[free] = x
    return best


class Calibrator:
    """The last ``window`` measured micro-batches of one kind of pass, and the fit over them."""

    def __init__(self, window: int = 1024) -> None:
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=window)

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, tokens: float, squares: float, seconds: float) -> None:
        """One micro-batch: tokens held, sum of squared lengths, time in seconds. Fillers (no
        tokens) are left out.
        """
        if tokens > 0:
            self._samples.append((float(tokens), float(squares), float(seconds)))

    def samples(self) -> Floats:
        """float64 [micro-batches, 3]: tokens, squares, seconds."""
        return np.array(self._samples, np.float64).reshape(-1, 3)

    def fit(self) -> Calibration | None:
        """The fit over the window, or None while too little is known."""
        samples = self.samples()
        return calibrate(samples[:, 0], samples[:, 1], samples[:, 2])

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the samples; the fit follows from them."""
        return {"samples": self.samples()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved samples."""
        self._samples.clear()
        self._samples.extend((float(t), float(q), float(s)) for t, q, s in state["samples"])
