"""Gradient clipping that follows the size of the optimizer step (A10)."""

from __future__ import annotations

from trainer.base.errors import UserError


def adaptive_clip(grad_clip: float, sequences: int, min_batch_size: int) -> float:
    """Norm threshold of a step: ``grad_clip * min(1, sequences / min_batch_size)``.

    ``sequences`` counts those of the optimizer step over all ranks, so every rank clips alike: with
    1.0 and 8, four sequences give 0.5. Raises UserError for a
    threshold that is not positive and a size below 1.
    """
    key = "actor_rollout_ref.actor.grad_clip"
    if grad_clip <= 0:
        raise UserError(
            f"{key}={grad_clip}: the threshold must be positive; write a large number to switch "
            "clipping off"
        )
    if min_batch_size < 1:
        raise UserError(f"{key}_min_batch_size={min_batch_size}: write 1 or more")
    return grad_clip * min(1.0, max(sequences, 0) / min_batch_size)
