"""What an optimizer step minimises, as a plain sum over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from trainer.algorithms import (
    BY_COVARIANCE,
    POLICY_LOSSES,
    POLICY_SUMS,
    LossAggMode,
    PolicyLossSettings,
    PolicyTokens,
    add_terms,
    aggregate,
    is_clamped,
    kl_loss,
    select_by_covariance,
    sequence_index,
    sft_loss,
    token_weights,
)
from trainer.config.schema import Actor, Config
from trainer.data.batch import Batch
from trainer.models import Packed, TokenStats, token_stats
from trainer.update.forward import at_targets

Outputs = TypeVar("Outputs")


class Objective(Protocol[Outputs]):
    """The loss of an optimizer step, one micro-batch at a time."""

    sum_names: tuple[str, ...]
    """Names of the sums that ``__call__`` returns; the same on every rank."""

    def attach_weights(self, batch: Batch) -> None:
        """Attach the column ``weights`` ``[tokens]``, from the counts of the whole optimizer step.

        Called before the batch is split, so that the step's loss is a plain sum over micro-batches.
        """

    def predict(self, module: nn.Module, packed: Packed, forward: Callable[..., Any]) -> Outputs:
        """What the loss needs of ``module`` for a micro-batch; ``forward`` is called in its
        place.
        """

    def __call__(
        self, micro: Batch, packed: Packed, outputs: Outputs, /
    ) -> tuple[Tensor, Mapping[str, float]]:
        """The loss of a micro-batch (scalar) and sums to be added over micro-batches and ranks."""


class OfLogProbs:
    """An objective that reads the log-probs of the targets."""

    temperature: float = 1.0
    """Logits are divided by it before the log-probs."""
    needs_entropy = False
    """Whether ``TokenStats.entropy`` is read."""

    def predict(self, module: nn.Module, packed: Packed, forward: Callable[..., Any]) -> TokenStats:
        """Log-probs, and entropies where they are needed, of a micro-batch."""
        return token_stats(
            module,
            packed,
            temperature=self.temperature,
            entropy=self.needs_entropy,
            forward=forward,
        )


@dataclass(frozen=True, kw_only=True)
class LossAggregation:
    """How the losses of tokens are averaged to the loss of a step (``actor.loss_agg_mode``)."""

    mode: LossAggMode
    max_response_length: int

    @classmethod
    def from_config(cls, config: Config) -> LossAggregation:
        """From ``actor.loss_agg_mode`` and ``data.max_response_length``."""
        return cls(
            mode=config.actor_rollout_ref.actor.loss_agg_mode,
            max_response_length=config.data.max_response_length,
        )

    def attach_weights(self, batch: Batch) -> None:
        """Attach the column ``weights`` ``[tokens]`` from the counts of the whole step. A token
        that was rejected weighs nothing, and the others no more for it: the scale of the loss does
        not move with what is left out.
        """
        batch.columns["weights"] = token_weights(
            self.mode,
            batch.columns["loss_mask"],
            sequence_index(batch.cu_seqlens),
            len(batch),
            max_response_length=self.max_response_length,
        )
        kept = batch.columns.get("rollout_kept")
        if kept is not None:
            batch.columns["weights"] = batch.columns["weights"] * kept


class SftObjective(OfLogProbs):
    """Negative log-likelihood of the responses."""

    sum_names: tuple[str, ...] = ("loss", "tokens", "nll")

    def __init__(self, aggregation: LossAggregation) -> None:
        self._aggregation = aggregation

    def attach_weights(self, batch: Batch) -> None:
        """Attach the column ``weights`` ``[tokens]``."""
        self._aggregation.attach_weights(batch)

    def __call__(
        self, micro: Batch, packed: Packed, stats: TokenStats
    ) -> tuple[Tensor, Mapping[str, float]]:
        """The loss of a micro-batch (scalar), and the sums ``loss``, ``tokens`` and ``nll``."""
        out = sft_loss(stats.log_probs)
        loss = aggregate(out.losses, _at_targets(micro, "weights", packed, stats))
        sums = {name: float(value) for name, value in out.sums.items()}
        return loss, {"loss": float(loss.detach()), **sums}

    @staticmethod
    def metrics(sums: Mapping[str, float], steps: int) -> dict[str, float]:
        """Metrics from the sums over an iteration, which has one optimizer step in SFT."""
        return {"train/loss": sums["loss"], "train/nll": sums["nll"] / max(sums["tokens"], 1.0)}


class PolicyObjective(OfLogProbs):
    """The policy loss of ``policy_loss.loss_mode``, an entropy bonus and the KL to the reference
    when the settings ask for them.
    """

    needs_entropy = True
    sum_names: tuple[str, ...] = (
        *POLICY_SUMS,
        "loss",
        "pg_loss",
        "entropy",
        "kl",
        "kl_clamped",
        "rollout_diff",
    )

    def __init__(
        self,
        actor: Actor,
        aggregation: LossAggregation,
        *,
        temperature: float,
        rollout_log_probs: bool,
    ) -> None:
        """``rollout_log_probs``: log how far the engine's probabilities are from the trainer's."""
        self.temperature = temperature
        self._actor = actor
        self._aggregation = aggregation
        self._rollout_log_probs = rollout_log_probs
        self._mode = actor.policy_loss.loss_mode
        self._policy_loss = POLICY_LOSSES[self._mode]
        self._settings = policy_loss_settings(actor)

    def attach_weights(self, batch: Batch) -> None:
        """Attach the column ``weights`` ``[tokens]``, and ``selected`` where the loss treats tokens
        of the step apart.
        """
        self._aggregation.attach_weights(batch)
        if self._mode in BY_COVARIANCE:
            batch.columns["selected"] = select_by_covariance(
                self._mode,
                self._settings,
                old_log_probs=batch.columns["old_log_probs"],
                advantages=batch.columns["advantages"],
                mask=batch.columns["loss_mask"],
                draws=batch.columns.get("draws"),
            )

    def __call__(
        self, micro: Batch, packed: Packed, stats: TokenStats
    ) -> tuple[Tensor, Mapping[str, float]]:
        """The loss of a micro-batch (scalar), and the sums named by ``sum_names``."""
        actor = self._actor
        log_probs = stats.log_probs
        policy = self._policy_loss(policy_tokens(micro, packed, stats), self._settings)
        policy_losses = policy.losses
        if "rollout_is_weights" in micro.columns:
            policy_losses = policy_losses * _at_targets(micro, "rollout_is_weights", packed, stats)
        kl = None
        clamped = None
        if actor.use_kl_loss:
            reference = _at_targets(micro, "ref_log_probs", packed, stats)
            kl = kl_loss(log_probs, reference, actor.kl_loss_type)
            clamped = is_clamped(log_probs, reference, actor.kl_loss_type)
        losses = add_terms(
            policy_losses,
            entropy=stats.entropy,
            entropy_coeff=actor.entropy_coeff,
            kl=kl,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        )
        weights = _at_targets(micro, "weights", packed, stats)
        loss = aggregate(losses, weights)
        with torch.no_grad():
            sums = {name: float(value) for name, value in policy.sums.items()}
            sums["loss"] = float(loss)
            sums["pg_loss"] = float(aggregate(policy_losses, weights))
            sums["entropy"] = _total(stats.entropy)
            sums["kl"] = _total(kl)
            sums["kl_clamped"] = _total(clamped)
            sums["rollout_diff"] = _rollout_diff(micro, packed, stats)
        return loss, sums

    def metrics(self, sums: Mapping[str, float], steps: int) -> dict[str, float]:
        """Metrics from the sums over the ``steps`` optimizer steps of an iteration."""
        tokens = max(sums["tokens"], 1.0)
        logged = {
            "actor/pg_clipfrac": sums["pg_clipfrac"] / tokens,
            "actor/pg_clipfrac_lower": sums["pg_clipfrac_lower"] / tokens,
            "actor/ppo_kl": sums["ppo_kl"] / tokens,
            "actor/entropy": sums["entropy"] / tokens,
        }
        if self._mode in BY_COVARIANCE:
            logged["actor/cov_selected"] = sums["cov_selected"] / tokens
        if self._rollout_log_probs:
            logged["training/rollout_probs_diff_mean"] = sums["rollout_diff"] / tokens
        if self._actor.use_kl_loss:
            logged["actor/kl_loss"] = sums["kl"] / tokens
            logged["actor/kl_clamped"] = sums["kl_clamped"] / tokens
            logged["actor/kl_coef"] = self._actor.kl_loss_coef
        logged["actor/pg_loss"] = sums["pg_loss"] / steps
        logged["actor/loss"] = sums["loss"] / steps
        return logged


def make_objective(config: Config) -> PolicyObjective | SftObjective:
    """The objective of ``trainer.mode``."""
    aggregation = LossAggregation.from_config(config)
    if config.trainer.mode == "sft":
        return SftObjective(aggregation)
    rollout = config.actor_rollout_ref.rollout
    return PolicyObjective(
        config.actor_rollout_ref.actor,
        aggregation,
        temperature=rollout.temperature,
        rollout_log_probs=rollout.calculate_log_probs,
    )


def policy_loss_settings(actor: Actor) -> PolicyLossSettings:
    """What the policy losses read of ``actor``."""
    loss = actor.policy_loss
    return PolicyLossSettings(
        clip_ratio_low=actor.clip_ratio_low,
        clip_ratio_high=actor.clip_ratio_high,
        clip_ratio_c=actor.clip_ratio_c,
        clip_cov_ratio=loss.clip_cov_ratio,
        clip_cov_lb=loss.clip_cov_lb,
        clip_cov_ub=loss.clip_cov_ub,
        kl_cov_ratio=loss.kl_cov_ratio,
        ppo_kl_coef=loss.ppo_kl_coef,
    )


def policy_tokens(micro: Batch, packed: Packed, stats: TokenStats) -> PolicyTokens:
    """The trained tokens of a micro-batch as the policy losses take them."""
    if "old_log_probs" in micro.columns:
        old_log_probs = _at_targets(micro, "old_log_probs", packed, stats)
    else:
        # One optimizer step per rollout: the sampling policy is the one updated, the ratio 1.
        old_log_probs = stats.log_probs.detach()
    selected = None
    if "selected" in micro.columns:
        selected = _at_targets(micro, "selected", packed, stats)
    sequence = sequence_index(micro.cu_seqlens)[packed.targets]
    return PolicyTokens(
        log_probs=stats.log_probs,
        old_log_probs=old_log_probs,
        advantages=_at_targets(micro, "advantages", packed, stats),
        sequence=sequence.to(stats.log_probs.device, non_blocking=True),
        selected=selected,
    )


def _total(values: Tensor | None) -> float:
    """Sum of ``values`` ``[targets]`` in float64; 0 for None."""
    return 0.0 if values is None else float(values.double().sum())


def _rollout_diff(micro: Batch, packed: Packed, stats: TokenStats) -> float:
    """Sum over the targets of |probability now - probability when sampled|.

    0 when the batch has no column ``rollout_log_probs``.
    """
    if "rollout_log_probs" not in micro.columns:
        return 0.0
    sampled = _at_targets(micro, "rollout_log_probs", packed, stats)
    return float((stats.log_probs.exp() - sampled.exp()).abs().double().sum())


def _at_targets(micro: Batch, column: str, packed: Packed, stats: TokenStats) -> Tensor:
    """Values ``[targets]`` of a column ``[tokens]``, on the model's device."""
    return at_targets(micro, column, packed, stats.log_probs.device)
