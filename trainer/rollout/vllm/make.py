"""From ``actor_rollout_ref.rollout`` to an engine of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.config.schema import Rollout
from trainer.environment import rank_from_environment
from trainer.errors import UserError
from trainer.models import LoadedModel
from trainer.parallel.world import World
from trainer.rollout.protocol import RolloutEngine
from trainer.rollout.settings import KEY
from trainer.rollout.vllm.inprocess import VllmEngine
from trainer.rollout.vllm.keeper import Limits
from trainer.rollout.vllm.options import options, server_environments
from trainer.rollout.vllm.servers import VllmServerEngine


def make_vllm_engine(
    rollout: Rollout, loaded: LoadedModel, world: World, run_dir: Path, *, eos_ids: Sequence[int]
) -> RolloutEngine:
    """The engine ``vllm`` or ``vllm_server`` of this rank; logs and model folder lie in ``run_dir/vllm``.

    Raises :class:`UserError` for settings that don't fit together, or when vLLM is not installed.
    """
    ranks = rank_from_environment().local_world_size
    wanted = options(rollout, loaded.shape, next(loaded.model.parameters()).dtype, world, local_ranks=ranks)
    _check_length(loaded, wanted.max_model_len)
    folder = run_dir / "vllm"
    if rollout.name == "vllm":
        return VllmEngine(loaded, wanted, world, eos_ids=eos_ids, folder=folder / f"rank_{world.rank}")
    node = world.rank - world.local_rank  # the rank that keeps this node's servers
    return VllmServerEngine(
        loaded,
        wanted,
        world,
        eos_ids=eos_ids,
        folder=folder / f"node_of_rank_{node}",
        replicas=rollout.server.replicas,
        limits=Limits(
            start_timeout_s=rollout.server.start_timeout_s,
            timeout_s=rollout.timeout_s,
            max_restarts=rollout.max_restarts,
        ),
        env=server_environments(rollout, world, local_ranks=ranks),
    )


def _check_length(loaded: LoadedModel, length: int) -> None:
    longest = getattr(loaded.model.config, "max_position_embeddings", None)
    if isinstance(longest, int) and length > longest:
        raise UserError(
            f"{KEY}.prompt_length + response_length = {length} tokens, and {loaded.source} knows {longest} positions "
            "(max_position_embeddings): lower data.max_prompt_length or data.max_response_length"
        )
