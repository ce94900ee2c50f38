"""What one job needs of the cluster, read from its own resolved config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.submit.cluster_config import Cluster, Container, from_mapping
from trainer.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Resources of one job. Jobs of equal shape share a script and become one array."""

    nodes: int
    """All of them."""
    rollout_nodes: int = 0
    """Of these the last ones, which hold vLLM servers and no rank."""
    ranks_per_node: int
    """Processes on each node: ranks, one each, or those that hold servers."""
    gpus_per_node: int
    """0 for a CPU job."""
    cluster: Cluster
    container: Container

    @property
    def ranks(self) -> int:
        """World size."""
        return (self.nodes - self.rollout_nodes) * self.ranks_per_node

    @property
    def nodes_key(self) -> str:
        """What the number of nodes follows from."""
        return "trainer.nnodes" + (
            " + actor_rollout_ref.rollout.nnodes" if self.rollout_nodes else ""
        )

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.nodes * self.gpus_per_node

    def label(self) -> str:
        """A short name that is safe in file names: ``1n2g`` is one node with two GPUs, ``1n2c`` two
        ranks on CPUs, ``3n2g1r`` three nodes, one of which holds vLLM servers.
        """
        unit = f"{self.gpus_per_node}g" if self.gpus_per_node else f"{self.ranks_per_node}c"
        return f"{self.nodes}n{unit}" + (f"{self.rollout_nodes}r" if self.rollout_nodes else "")


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a resolved config (``trainer.nnodes``, ``trainer.n_gpus_per_node``,
    ``trainer.device``, ``actor_rollout_ref.rollout``).

    Raises UserError for sizes below 1 and for more GPUs than a node of the site has, or than the
    job has for servers.
    """
    trainer = config.get("trainer") or {}
    rollout = (config.get("actor_rollout_ref") or {}).get("rollout") or {}
    cluster = from_mapping(Cluster, config.get("cluster"))
    container = from_mapping(Container, config.get("container"))
    nodes = _size(trainer, "nnodes")
    rollout_nodes = int(rollout.get("nnodes", 0))
    ranks = _size(trainer, "n_gpus_per_node")
    gpus = 0 if trainer.get("device") == "cpu" or cluster.gpu_style == "none" else ranks
    if cluster.max_gpus_per_node is not None and gpus > cluster.max_gpus_per_node:
        raise UserError(
            f"trainer.n_gpus_per_node={gpus}, but a node of cluster '{cluster.name}' has "
            f"{cluster.max_gpus_per_node} "
            f"GPUs; use trainer.n_gpus_per_node={cluster.max_gpus_per_node} and more "
            "trainer.nnodes."
        )
    size = int(rollout.get("tensor_model_parallel_size", 1))
    needed = int((rollout.get("server") or {}).get("replicas", 1)) * size
    if rollout_nodes and gpus and needed > gpus:
        raise UserError(
            f"actor_rollout_ref.rollout.server.replicas x tensor_model_parallel_size={size} is "
            f"{needed} GPUs of each "
            f"node that holds servers, which has trainer.n_gpus_per_node={gpus}: lower one of "
            "them, and set "
            "actor_rollout_ref.rollout.nnodes for more servers."
        )
    return Shape(
        nodes=nodes + rollout_nodes,
        rollout_nodes=rollout_nodes,
        ranks_per_node=ranks,
        gpus_per_node=gpus,
        cluster=cluster,
        container=container,
    )


def _size(trainer: Mapping[str, Any], key: str) -> int:
    value = trainer.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"trainer.{key}={value!r} must be a whole number of at least 1.")
    return value
