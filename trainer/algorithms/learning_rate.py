"""The learning rate as a pure function of the step, so that a checkpoint need not keep it."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    lr: float,
    kind: str,
    warmup_steps: int,
    total_steps: int,
    min_lr_ratio: float = 0.0,
) -> float:
    """The learning rate of step ``step``, counted from 0.

    Warm-up rises linearly and first reaches ``lr`` at step ``warmup_steps``; its first step is not
    0 but ``lr / (warmup_steps + 1)``, so that every step trains. Then ``constant``, or falling
    (``linear``, ``cosine``) as transformers and verl do: ``min_lr_ratio * lr`` is reached at step
    ``total_steps``, one after the last, which therefore still trains when the ratio is 0. Raises
    ValueError for another ``kind``.
    """
    if kind not in ("constant", "linear", "cosine"):
        raise ValueError(f"lr_scheduler_type {kind!r} is none of constant, linear, cosine")
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if kind == "constant":
        return lr
    span = max(total_steps - warmup_steps, 1)
    progress = min((step - warmup_steps) / span, 1.0)
    remaining = 1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (min_lr_ratio + (1.0 - min_lr_ratio) * remaining)
