"""What an optimizer step minimises, as a plain sum over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms import (
    POLICY_SUMS,
    LossAggMode,
    add_terms,
    aggregate,
    kl_estimate,
    policy_loss,
    sequence_index,
    sft_loss,
    token_weights,
)
from trainer.config.schema import Actor
from trainer.data.batch import Batch
from trainer.models import Packed, TokenStats


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """How token losses weigh in the loss of a step."""

    mode: LossAggMode
    max_response_length: int

    def attach(self, batch: Batch) -> None:
        """Make the column ``weights`` from the counts of the whole step, before it is split."""
        batch.columns["weights"] = token_weights(
            self.mode,
            batch.columns["loss_mask"],
            sequence_index(batch.cu_seqlens),
            len(batch),
            max_response_length=self.max_response_length,
        )


class Sft:
    """Negative log-likelihood of the responses."""

    temperature = 1.0
    wants_entropy = False
    sums: tuple[str, ...] = ("loss", "tokens", "nll")

    def __init__(self, weighing: Weighing) -> None:
        self._weighing = weighing

    def bind(self, batch: Batch) -> None:
        """See :class:`trainer.update.optimizer_step.Objective`."""
        self._weighing.attach(batch)

    def __call__(
        self, micro: Batch, packed: Packed, stats: TokenStats
    ) -> tuple[Tensor, Mapping[str, float]]:
        """See :class:`trainer.update.optimizer_step.Objective`."""
        out = sft_loss(stats.log_probs)
        loss = aggregate(out.losses, _at(micro, "weights", packed, stats))
        return loss, {"loss": float(loss.detach()), **{k: float(v) for k, v in out.sums.items()}}

    @staticmethod
    def metrics(sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over the step -> what is logged."""
        return {"train/loss": sums["loss"], "train/nll": sums["nll"] / max(sums["tokens"], 1.0)}


class Policy:
    """PPO's clipped loss, with entropy bonus and KL to the reference where the settings ask for
    them.
    """

    wants_entropy = True
    sums: tuple[str, ...] = (*POLICY_SUMS, "loss", "pg_loss", "entropy", "kl", "rollout_diff")

    def __init__(
        self, actor: Actor, weighing: Weighing, *, temperature: float, rollout_log_probs: bool
    ) -> None:
        self._actor = actor
        self._rollout_log_probs = rollout_log_probs
        self._weighing = weighing
        self.temperature = temperature

    def bind(self, batch: Batch) -> None:
        """See :class:`trainer.update.optimizer_step.Objective`."""
        self._weighing.attach(batch)

    def __call__(
        self, micro: Batch, packed: Packed, stats: TokenStats
    ) -> tuple[Tensor, Mapping[str, float]]:
        """See :class:`trainer.update.optimizer_step.Objective`."""
        actor, new = self._actor, stats.log_probs
        # One optimizer step per rollout: the policy that sampled is the one being updated, its
        # ratio is 1.
        old = (
            _at(micro, "old_log_probs", packed, stats)
            if "old_log_probs" in micro.columns
            else new.detach()
        )
        out = policy_loss(
            new,
            old,
            _at(micro, "advantages", packed, stats),
            clip_ratio_low=actor.clip_ratio_low,
            clip_ratio_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
        )
        weights = _at(micro, "weights", packed, stats)
        kl = None
        if actor.use_kl_loss:
            kl = kl_estimate(new, _at(micro, "ref_log_probs", packed, stats), actor.kl_loss_type)
        losses = add_terms(
            out.losses,
            entropy=stats.entropy,
            entropy_coeff=actor.entropy_coeff,
            kl=kl,
            kl_loss_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
        )
        loss = aggregate(losses, weights)
        with torch.no_grad():
            sums = {
                **{k: float(v) for k, v in out.sums.items()},
                "loss": float(loss),
                "pg_loss": float(aggregate(out.losses, weights)),
                "entropy": 0.0 if stats.entropy is None else float(stats.entropy.double().sum()),
                "kl": 0.0 if kl is None else float(kl.double().sum()),
                "rollout_diff": _rollout_diff(micro, packed, stats),
            }
        return loss, sums

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over one or several optimizer steps -> what is logged; ``loss`` and ``pg_loss`` are
        sums over steps.
        """
        tokens = max(sums["tokens"], 1.0)
        logged = {
            "actor/pg_clipfrac": sums["pg_clipfrac"] / tokens,
            "actor/pg_clipfrac_lower": sums["pg_clipfrac_lower"] / tokens,
            "actor/ppo_kl": sums["ppo_kl"] / tokens,
            "actor/entropy": sums["entropy"] / tokens,
        }
        if self._rollout_log_probs:
            logged["training/rollout_probs_diff_mean"] = sums["rollout_diff"] / tokens
        if self._actor.use_kl_loss:
            logged["actor/kl_loss"] = sums["kl"] / tokens
            logged["actor/kl_coef"] = self._actor.kl_loss_coef
        return logged


def _rollout_diff(micro: Batch, packed: Packed, stats: TokenStats) -> float:
    """Sum over the targets of |probability here - probability when sampled|; 0 when the rollout
    told none.
    """
    if "rollout_log_probs" not in micro.columns:
        return 0.0
    sampled = _at(micro, "rollout_log_probs", packed, stats)
    return float((stats.log_probs.exp() - sampled.exp()).abs().double().sum())


def _at(micro: Batch, column: str, packed: Packed, stats: TokenStats) -> Tensor:
    """The targets' values of a column, on the model's device."""
    return micro.columns[column][packed.targets].to(stats.log_probs.device, non_blocking=True)
