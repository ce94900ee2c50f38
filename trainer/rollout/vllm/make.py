"""From ``actor_rollout_ref.rollout`` to an engine of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.base.environment import rank_from_environment
from trainer.config.schema import Rollout
from trainer.launch.rollout_nodes import find
from trainer.models import LoadedModel
from trainer.ranks.world import World
from trainer.rollout.protocol import RolloutEngine
from trainer.rollout.vllm.client.engine import VllmServerEngine
from trainer.rollout.vllm.client.pool import Fleet, OwnNode
from trainer.rollout.vllm.client.resources import server_environments
from trainer.rollout.vllm.client.supervisor import Limits
from trainer.rollout.vllm.engine.options import Options, options
from trainer.rollout.vllm.in_process.engine import VllmEngine
from trainer.rollout.vllm.nodes.remote_pool import Hosts

NOTE_S = 60.0
"""Longest wait for a host's note, which rank 0 has seen: file systems take a while to tell all
nodes.
"""


def make_vllm_engine(
    rollout: Rollout, loaded: LoadedModel, world: World, run_dir: Path, *, eos_ids: Sequence[int]
) -> RolloutEngine:
    """The engine ``vllm`` or ``vllm_server`` of this rank; logs and model folder lie in
    ``run_dir/vllm``.

    Raises :class:`UserError` for settings that don't fit together, or when vLLM is not installed.
    """
    ranks = rank_from_environment().local_world_size
    wanted = options(
        rollout, loaded.shape, next(loaded.model.parameters()).dtype, world, local_ranks=ranks
    )
    loaded.require_positions(wanted.max_model_len)
    if rollout.name == "vllm":
        return VllmEngine(
            loaded, wanted, world, eos_ids=eos_ids, folder=run_dir / "vllm" / f"rank_{world.rank}"
        )
    limits = Limits(
        start_timeout_s=rollout.server.start_timeout_s,
        timeout_s=rollout.timeout_s,
        max_restarts=rollout.max_restarts,
    )
    fleet = _fleet(rollout, loaded, wanted, world, run_dir, ranks, limits)
    return VllmServerEngine(fleet, wanted, eos_ids=eos_ids, limits=limits)


def _fleet(
    rollout: Rollout,
    loaded: LoadedModel,
    wanted: Options,
    world: World,
    run_dir: Path,
    ranks: int,
    limits: Limits,
) -> Fleet:
    replicas = rollout.server.replicas
    if rollout.nnodes:
        hosts = find(run_dir, rollout.nnodes, NOTE_S)
        return Hosts(
            hosts,
            loaded,
            world,
            local_ranks=ranks,
            run_dir=run_dir,
            replicas=replicas,
            limits=limits,
        )
    folder = (
        run_dir / "vllm" / f"node_of_rank_{world.rank - world.local_rank}"
    )  # of the rank that keeps its servers
    env = server_environments(
        replicas, wanted.tensor_parallel_size, on_cpu=wanted.on_cpu, training=ranks
    )
    return OwnNode(loaded, world, folder=folder, env=env, limits=limits)
