"""``algorithm.rollout_correction``: weights and rejections of a step's tokens, their metrics."""

from __future__ import annotations

from trainer.algorithms import sequence_index
from trainer.algorithms.rollout_correction import (
    Samples,
    importance_weights,
    kept_tokens,
    off_policy_metrics,
    rejection_metrics,
    weight_metrics,
)
from trainer.config.schema.algorithm import RolloutCorrection, rejection_bounds
from trainer.data import Batch


def corrects(settings: RolloutCorrection) -> bool:
    """Whether tokens are weighted or left out, for which the trainer's own log-probs are needed."""
    return settings.rollout_is is not None or settings.rollout_rs is not None


def attach_rollout_correction(settings: RolloutCorrection, batch: Batch) -> dict[str, float]:
    """Attach ``rollout_is_weights`` and ``rollout_kept`` ``[tokens]``, as far as they are asked
    for; metrics.

    Needs the columns ``old_log_probs``, of the trainer, and ``rollout_log_probs``; without one of
    them nothing is compared.
    """
    if settings.bypass_mode or not {"old_log_probs", "rollout_log_probs"} <= set(batch.columns):
        return {}
    samples = Samples(
        old_log_probs=batch.columns["old_log_probs"],
        rollout_log_probs=batch.columns["rollout_log_probs"],
        mask=batch.columns["loss_mask"],
        sequence=sequence_index(batch.cu_seqlens),
        sequences=len(batch),
    )
    metrics = off_policy_metrics(samples)
    if settings.rollout_is is not None:
        weights = importance_weights(
            samples,
            settings.rollout_is,
            threshold=settings.rollout_is_threshold,
            batch_normalize=settings.rollout_is_batch_normalize,
        )
        batch.columns["rollout_is_weights"] = weights
        metrics |= weight_metrics(samples, weights)
    bounds = rejection_bounds(settings)
    if settings.rollout_rs is not None and bounds is not None:
        kept = kept_tokens(samples, settings.rollout_rs, lower=bounds[0], upper=bounds[1])
        batch.columns["rollout_kept"] = kept
        metrics |= rejection_metrics(samples, kept)
    return metrics
