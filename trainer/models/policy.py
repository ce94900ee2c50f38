"""The model that a run trains, as its settings ask for it."""

from __future__ import annotations

import torch

from trainer.base.errors import UserError
from trainer.base.precision import resolve_precision
from trainer.config.schema import Config
from trainer.models.adapters import adapters_of
from trainer.models.load import LoadedModel, load_model


def load_policy(config: Config, device: torch.device) -> LoadedModel:
    """Load ``actor_rollout_ref.model`` in the precision of the actor, with LoRA adapters if asked.

    Raises UserError when no model is named, when it can't be loaded, and when prompts and responses
    exceed its positions.
    """
    section = config.actor_rollout_ref.model
    if section.path is None:
        raise UserError(
            "actor_rollout_ref.model.path is not set; type "
            "actor_rollout_ref.model.path=builtin:tiny to try"
        )
    wanted = config.actor_rollout_ref.actor.mixed_precision
    precision = resolve_precision(wanted, on_gpu=device.type == "cuda")
    model = load_model(
        section.path,
        dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        device=device,
        gradient_checkpointing=section.enable_gradient_checkpointing,
        adapters=adapters_of(config),
    )
    model.require_positions(config.data.max_prompt_length, config.data.max_response_length)
    return model
