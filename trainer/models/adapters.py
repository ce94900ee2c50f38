"""LoRA in a run: which adapters its settings ask for, and what ties a checkpoint of them to the
weights it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.base.errors import UserError
from trainer.config.schema import Config
from trainer.models import LoadedModel
from trainer.models.lora import Lora


def adapters_of(config: Config) -> Lora | None:
    """What of the model is trained in place of its own weights; None: all of these are."""
    model = config.actor_rollout_ref.model
    if not model.lora_rank:
        return None
    return Lora(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=model.target_modules,
        seed=config.trainer.seed,
    )


def adapters_state(config: Config, loaded: LoadedModel) -> dict[str, Any]:
    """What a checkpoint keeps of the weights that are frozen, instead of them."""
    model = config.actor_rollout_ref.model
    return {"alpha": float(model.lora_alpha), "base": loaded.frozen, "path": model.path}


def require_same_base(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Raises UserError when the adapters of a checkpoint (``theirs``: its ``adapters_state``) were
    trained on other weights, or would count for more or less here.
    """
    if theirs["alpha"] != ours["alpha"]:
        raise UserError(
            "the checkpoint was trained with "
            f"actor_rollout_ref.model.lora_alpha={theirs['alpha']:g}, this run has "
            f"{ours['alpha']:g}: set it to {theirs['alpha']:g}"
        )
    if theirs["base"] != ours["base"]:
        raise UserError(
            "the checkpoint holds adapters, trained on other weights than those of "
            f"{ours['path']}: set "
            "actor_rollout_ref.model.path to the model that the run began with (it was called "
            f"{theirs['path']})"
        )
