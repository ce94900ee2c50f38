"""LoRA in a run: the adapters of its settings, and the check that a checkpoint of adapters belongs
to the same base weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.base.errors import UserError
from trainer.config.schema import Config
from trainer.models.load import LoadedModel
from trainer.models.lora import Lora


def adapters_of(config: Config) -> Lora | None:
    """The adapters of ``actor_rollout_ref.model.lora_*``; None when all weights are trained."""
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
    """The entries of a checkpoint that stand for the base weights, which are not trained."""
    model = config.actor_rollout_ref.model
    return {"alpha": float(model.lora_alpha), "base": loaded.base_digest, "path": model.path}


def require_same_base(current: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise UserError when a checkpoint's adapters belong to other base weights or another alpha.

    Both are values of ``adapters_state``: the run's and the checkpoint's.
    """
    if saved["alpha"] != current["alpha"]:
        raise UserError(
            "the checkpoint was trained with "
            f"actor_rollout_ref.model.lora_alpha={saved['alpha']:g}, this run has "
            f"{current['alpha']:g}: set it to {saved['alpha']:g}"
        )
    if saved["base"] != current["base"]:
        raise UserError(
            "the checkpoint holds adapters, trained on other weights than those of "
            f"{current['path']}: set "
            "actor_rollout_ref.model.path to the model that the run began with (it was called "
            f"{saved['path']})"
        )
