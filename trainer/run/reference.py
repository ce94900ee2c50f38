"""The reference policy that the KL refers to: the first weights, or an average that follows."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from trainer.config.schema import Config
from trainer.models import LoadedModel
from trainer.run.context import RunContext


def make_reference(config: Config, model: LoadedModel) -> nn.Module | None:
    """A copy of the model's weights; with LoRA the model itself, whose base weights stay as they
    are. None when the settings use no KL to a reference.
    """
    uses_kl = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if config.trainer.mode == "sft" or not uses_kl:
        return None
    if model.has_adapters:
        return model.model
    return copy.deepcopy(model.model).eval().requires_grad_(False)


def update_reference(ctx: RunContext, step: int) -> dict[str, float]:
    """Move the reference towards the policy every ``ref.ema_interval`` training steps. Collective.

    reference <- decay * reference + (1 - decay) * policy: the soft update of TR-DPO (Gorbatovski et
    al., arXiv 2404.09656), or with a decay of 0 its hard update. The sum is taken in float32 and
    rounded once: in bf16 a decay near 1 would round small moves away.
    """
    ref = ctx.config.actor_rollout_ref.ref
    if ctx.reference is None or ref.ema_interval is None:
        return {}
    if step % ref.ema_interval == 0:
        with torch.no_grad(), ctx.engine.whole_weights() as policy:
            pairs = zip(ctx.reference.parameters(), policy.parameters(), strict=True)
            for reference, current in pairs:
                reference.copy_(torch.lerp(current.float(), reference.float(), ref.ema_decay))
    return {"actor/reference_step": float(step - step % ref.ema_interval)}


def reference_state(ctx: RunContext) -> dict[str, Tensor]:
    """The reference's tensors for a checkpoint; empty while the reference does not move."""
    if ctx.reference is None or ctx.config.actor_rollout_ref.ref.ema_interval is None:
        return {}
    return {f"reference.{name}": p.detach() for name, p in ctx.reference.named_parameters()}
