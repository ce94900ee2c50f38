"""Make the rollout engine that ``actor_rollout_ref.rollout.name`` names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.errors import UserError, nearest
from trainer.rollout.settings import KEY

if TYPE_CHECKING:  # a vLLM server's process imports this package without needing transformers
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
    """Make this rank's engine ``rollout.name``, not started yet.

    ``module``: the trained model, whose weights the engine ``hf`` reads. ``run_dir``: where an
    engine with processes of its own keeps their logs. Raises UserError for an unknown engine, and
    for settings that vLLM can't work with.
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
    """Tokens that end a response: the tokenizer's and those of the model's generation config, of
    which chat models have several. Raises UserError when there is none.
    """
    candidates = {tokenizer.eos_token_id}
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    candidates.update(configured if isinstance(configured, list | tuple) else [configured])
    ids = sorted(int(i) for i in candidates if i is not None)
    if not ids:
        raise UserError(
            "actor_rollout_ref.model.path: neither tokenizer nor generation config names an end "
            "token"
        )
    return ids
