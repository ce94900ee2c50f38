"""What one job needs of the cluster, read from its own resolved config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.site import Cluster, Container, from_mapping
from trainer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Resources of one job. Jobs of equal shape share a script and become one array."""

    nodes: int
    ranks_per_node: int
    """Ranks on each node, one process each."""
    gpus_per_node: int
    """0 for a CPU job."""
    cluster: Cluster
    container: Container

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.nodes * self.gpus_per_node

    def label(self) -> str:
        """A short name that is safe in file names: ``1n2g`` is one node with two GPUs, ``1n2c`` two ranks on CPUs."""
        unit = f"{self.gpus_per_node}g" if self.gpus_per_node else f"{self.ranks_per_node}c"
        return f"{self.nodes}n{unit}"


def shape_of(config: Mapping[str, Any]) -> Shape:
    """The shape of a resolved config (``trainer.nnodes``, ``trainer.n_gpus_per_node``, ``trainer.device``).

    Raises UserError for sizes below 1 and for more GPUs than a node of the site has.
    """
    trainer = config.get("trainer") or {}
    cluster = from_mapping(Cluster, config.get("cluster"))
    container = from_mapping(Container, config.get("container"))
    nodes = _size(trainer, "nnodes")
    ranks = _size(trainer, "n_gpus_per_node")
    gpus = 0 if trainer.get("device") == "cpu" or cluster.gpu_style == "none" else ranks
    if cluster.max_gpus_per_node is not None and gpus > cluster.max_gpus_per_node:
        raise UserError(
            f"trainer.n_gpus_per_node={gpus}, but a node of cluster '{cluster.name}' has {cluster.max_gpus_per_node} "
            f"GPUs; use trainer.n_gpus_per_node={cluster.max_gpus_per_node} and more trainer.nnodes."
        )
    return Shape(nodes=nodes, ranks_per_node=ranks, gpus_per_node=gpus, cluster=cluster, container=container)


def _size(trainer: Mapping[str, Any], key: str) -> int:
    value = trainer.get(key, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"trainer.{key}={value!r} must be a whole number of at least 1.")
    return value
