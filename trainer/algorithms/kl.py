"""Estimators of KL(policy || reference) from sampled tokens, and the controllers of its weight in
the reward.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

KlType = Literal["k1", "kl", "k2", "mse", "k3", "low_var_kl", "abs"]
KlLossType = Literal[KlType, "k1+", "kl+", "k3+", "low_var_kl+", "abs+"]
MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, kind: KlType) -> Tensor:
    """KL estimate of each token in nats: float32 [targets], from log-probs [targets] of tokens
    that the policy drew.

    With d = log-prob - reference log-prob: k1 (kl): d; k2 (mse): d^2 / 2; k3 (low_var_kl):
    exp(-d) + d - 1; abs: |d| (Schulman, "Approximating KL divergence", 2020). Computed in float32
    whatever the inputs: in bfloat16 log-probs near -8 are 0.03 apart, and exp overflows early. d is
    clamped to +-20, k3 also to 10, beyond which its gradient is 0. k1 as a *loss* has a mean
    gradient of 0: use it in the reward.

    Raises ValueError for an unknown ``kind``.
    """
    d = (log_probs.float() - ref_log_probs.float()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if kind in ("k1", "kl"):
        return d
    if kind in ("k2", "mse"):
        return 0.5 * d.square()
    if kind in ("k3", "low_var_kl"):
        return (torch.expm1(-d) + d).clamp(max=MAX_K3)
    if kind == "abs":
        return d.abs()
    raise ValueError(
        f"no KL estimator {kind!r}; there are k1 (kl), k2 (mse), k3 (low_var_kl) and abs"
    )


def kl_loss(log_probs: Tensor, ref_log_probs: Tensor, kind: KlLossType) -> Tensor:
    """KL estimate of each token as a term of the loss: float32 [targets].

    With a ``+`` behind its name an estimate keeps its value and takes the gradient of k2, d times
    that of the log-prob, whose mean over the policy is the gradient of the KL; that of k1 has the
    mean 0, and that of k3 is biased (Liu et al., "Rethinking KL regularization in RLHF", arXiv
    2510.01555).
    """
    name = kind.removesuffix("+")
    value = kl_estimate(log_probs, ref_log_probs, name)  # type: ignore[arg-type]
    if name == kind:
        return value
    gradient = kl_estimate(log_probs, ref_log_probs, "k2")
    return gradient - gradient.detach() + value.detach()


def is_clamped(log_probs: Tensor, ref_log_probs: Tensor, kind: KlLossType) -> Tensor:
    """Where an estimate is held at a bound and has therefore lost its gradient: bool [targets].

    k3 at 10, which it reaches where the reference is some 12 times as likely as the policy; all at
    a log-ratio of +-20.
    """
    d = (log_probs.float() - ref_log_probs.float()).detach()
    clamped = d.abs() > MAX_LOG_RATIO
    if kind.removesuffix("+") in ("k3", "low_var_kl"):
        clamped |= torch.expm1(-d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) + d > MAX_K3
    return clamped


class KlController(Protocol):
    """Weight of the KL in the reward. Its state belongs in checkpoints."""

    coef: float

    def update(self, kl: float, sequences: int) -> None:
        """Adapt to the mean ``kl`` (nats per token) of a step of ``sequences`` sequences, over
        all ranks.
        """

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint."""

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved state."""


@dataclass
class FixedKl:
    """A constant weight."""

    coef: float

    def update(self, kl: float, sequences: int) -> None:
        """Nothing to do."""

    def state_dict(self) -> dict[str, float]:
        """Empty: the weight comes from the settings, also after a resume with others."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Nothing to load."""


@dataclass
class AdaptiveKl:
    """A weight that steers the KL to ``target`` nats per token (arXiv 1909.08593, section 2.2)."""

    coef: float
    target: float
    horizon: int

    def update(self, kl: float, sequences: int) -> None:
        """coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * sequences / horizon.

        A ``kl`` that is not finite is ignored.
        """
        error = kl / self.target - 1.0
        if not math.isfinite(error):
            return
        # Never below 0: a step of more sequences than five horizons would turn the penalty into a
        # bonus.
        self.coef *= max(1.0 + min(max(error, -0.2), 0.2) * sequences / self.horizon, 0.0)

    def state_dict(self) -> dict[str, float]:
        """The weight reached."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the weight reached; the empty state of a fixed controller changes nothing."""
        self.coef = state.get("coef", self.coef)


def make_kl_controller(
    kind: str, *, kl_coef: float, target_kl: float, horizon: int
) -> KlController:
    """The controller of ``algorithm.kl_ctrl``: fixed, or adaptive (old name: kl_controller).

    Raises ValueError for another ``kind``.
    """
    if kind == "fixed":
        return FixedKl(kl_coef)
    if kind in ("adaptive", "kl_controller"):
        return AdaptiveKl(kl_coef, target_kl, horizon)
    raise ValueError(f"algorithm.kl_ctrl.type {kind!r} is neither fixed nor adaptive")
