"""The policy that the KL is measured against: the model that the run began with, or one that
follows the policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.run.build import Context


def follow(ctx: Context, step: int) -> dict[str, float]:
    """After iteration ``step``: each ``ref.ema_interval`` iterations ref <- decay ref + (1 - decay)
    policy (the soft update of TR-DPO, Gorbatovski et al., arXiv 2404.09656; its hard update with a
    decay of 0). Collective.

    The sum is taken in float32 and rounded once; in bf16 a decay near 1 rounds small moves away.
    """
    ref = ctx.config.actor_rollout_ref.ref
    if ctx.reference is None or ref.ema_interval is None:
        return {}
    if step % ref.ema_interval == 0:
        with torch.no_grad(), ctx.engine.whole_weights() as policy:
            for kept, live in zip(ctx.reference.parameters(), policy.parameters(), strict=True):
                kept.copy_(torch.lerp(live.float(), kept.float(), ref.ema_decay))
    return {"actor/reference_step": float(step - step % ref.ema_interval)}


def reference_state(ctx: Context) -> dict[str, Tensor]:
    """What a checkpoint has to hold of the reference: nothing while it is frozen."""
    if ctx.reference is None or ctx.config.actor_rollout_ref.ref.ema_interval is None:
        return {}
    return {f"reference.{name}": p.detach() for name, p in ctx.reference.named_parameters()}
