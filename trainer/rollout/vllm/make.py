"""Build a vLLM engine from ``actor_rollout_ref.rollout``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.base.rank_info import rank_from_environment
from trainer.config.schema import Rollout
from trainer.launch.rollout_nodes import find_agents
from trainer.models import LoadedModel
from trainer.ranks.world import World
from trainer.rollout.protocol import RolloutEngine
from trainer.rollout.vllm.client.engine import VllmServerEngine
from trainer.rollout.vllm.client.pool import LocalPool, ServerPool
from trainer.rollout.vllm.client.spec import ServerLimits
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.resources import server_environments
from trainer.rollout.vllm.in_process.engine import VllmEngine
from trainer.rollout.vllm.nodes.remote_pool import RemotePool

ADDRESS_WAIT_S = 60.0
"""Longest wait for node agents' addresses, which rank 0 has seen before: a shared file system takes
a while to show a new file on all nodes.
"""


def make_vllm_engine(
    rollout: Rollout, loaded: LoadedModel, world: World, run_dir: Path, *, eos_ids: Sequence[int]
) -> RolloutEngine:
    """Build this rank's engine, ``vllm`` or ``vllm_server``, not started yet.

    Logs and the model folder go to ``run_dir/vllm``.

    Raises :class:`UserError` for settings that don't fit together, or when vLLM is not installed.
    """
    local_ranks = rank_from_environment().local_world_size
    dtype = next(loaded.model.parameters()).dtype
    options = Options.from_config(rollout, loaded.shape, dtype, world, local_ranks=local_ranks)
    loaded.require_positions(rollout.prompt_length, rollout.response_length)
    if rollout.name == "vllm":
        folder = run_dir / "vllm" / f"rank_{world.rank}"
        return VllmEngine(loaded, options, world, eos_ids=eos_ids, folder=folder)
    limits = ServerLimits.from_config(rollout)
    pool = _server_pool(rollout, loaded, options, world, run_dir, local_ranks, limits)
    return VllmServerEngine(pool, options, eos_ids=eos_ids, limits=limits)


def _server_pool(
    rollout: Rollout,
    loaded: LoadedModel,
    options: Options,
    world: World,
    run_dir: Path,
    local_ranks: int,
    limits: ServerLimits,
) -> ServerPool:
    """Build the pool of servers: on nodes of their own if the run has such, else on this node."""
    if rollout.nnodes:
        return RemotePool(
            find_agents(run_dir, rollout.nnodes, ADDRESS_WAIT_S),
            loaded,
            world,
            local_ranks=local_ranks,
            run_dir=run_dir,
            replicas=rollout.server.replicas,
            limits=limits,
        )
    first_rank = world.rank - world.local_rank  # supervises this node's servers
    environments = server_environments(
        rollout.server.replicas,
        options.tensor_parallel_size,
        on_cpu=options.on_cpu,
        training_gpus=local_ranks,
    )
    folder = run_dir / "vllm" / f"node_of_rank_{first_rank}"
    return LocalPool(loaded, world, folder=folder, environments=environments, limits=limits)
