"""From ``actor_rollout_ref.rollout.name`` to a generation engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.errors import UserError, nearest
from trainer.rollout.settings import KEY

if TYPE_CHECKING:  # an engine's own process imports this package, and has no use for transformers
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from trainer.config.schema import Rollout
    from trainer.models import LoadedModel
    from trainer.ranks.world import World
    from trainer.rollout.protocol import RolloutEngine

ENGINES = ("hf", "vllm", "vllm_server")


def make_engine(
    rollout: Rollout, loaded: LoadedModel, module: nn.Module, world: World, run_dir: Path
) -> RolloutEngine:
    """The engine ``rollout.name`` of this rank. ``module``: the trained model, with all weights
    where the engine reads them itself; ``run_dir``: where an engine with processes of its own keeps
    their logs.

    Raises :class:`UserError` for an engine that there isn't.
    """
    if rollout.name == "hf":
        from trainer.rollout.hf import HfEngine

        return HfEngine(
            module, eos_ids=eos_ids(module, loaded.tokenizer), max_num_seqs=rollout.max_num_seqs
        )
    if rollout.name in ("vllm", "vllm_server"):
        from trainer.rollout.vllm.make import make_vllm_engine

        return make_vllm_engine(
            rollout, loaded, world, run_dir, eos_ids=eos_ids(module, loaded.tokenizer)
        )
    raise UserError(
        f"{KEY}.name={rollout.name}: no such engine{nearest(rollout.name, ENGINES)}. There is "
        f"{', '.join(ENGINES)}"
    )


def eos_ids(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a response: the tokenizer's and those of the model's generation config (chat
    models name more than one). Raises :class:`UserError` when there is none.
    """
    found = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found.update(configured if isinstance(configured, list | tuple) else [configured])
    ids = sorted(int(i) for i in found if i is not None)
    if not ids:
        raise UserError(
            "actor_rollout_ref.model.path: neither tokenizer nor generation config names an end "
            "token"
        )
    return ids
