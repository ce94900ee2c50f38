"""The node agent: the servers of a node that trains nothing, supervised for other nodes' ranks."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.rollout.vllm.client.node_servers import NodeServers
from trainer.rollout.vllm.client.spec import ServerLimits, ServerSpec
from trainer.rollout.vllm.client.status_file import StatusFile
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.resources import kv_cache_bytes, server_environments
from trainer.rollout.vllm.engine.shared_weights import IncomingTensor

PEER_WAIT_S = 30.0
"""Longest wait for the other processes of this node, whose cores the servers get."""


def servers_folder(run_dir: Path, node: int) -> Path:
    """Return the folder of the logs of the servers on rollout node ``node``."""
    return run_dir / "vllm" / f"rollout_node_{node}"


class NodeAgent:
    """The servers of this node, and the processes that hold connections to it.

    Called from many threads.
    """

    def __init__(self, folder: Path, *, ip: str, token: str, tasks: int) -> None:
        """``tasks``: processes of the job on this node."""
        self.connected = threading.Event()
        """Rank 0 holds its lifeline."""
        self.disconnected = threading.Event()
        """Rank 0 has gone."""
        self.status_file = StatusFile(folder, secrets.token_hex(6))
        self.servers = NodeServers(folder, self.status_file, host=ip, token=token)
        self.cores = set(os.sched_getaffinity(0))
        self.peers = threading.Semaphore(0)
        """Released for each other process of this node."""
        self._node_name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._tasks = tasks

    def start_servers(self, request: dict[str, Any]) -> None:
        """Start servers with the cores or GPUs of this node."""
        replicas = int(request["replicas"])
        options = Options.from_dict(request["options"])
        self.status_file.create(replicas)
        self._use_peers_cores()
        try:
            environments = server_environments(
                replicas, options.tensor_parallel_size, on_cpu=options.on_cpu, training_gpus=0
            )
            if options.kv_cache_demand is not None and options.kv_cache_bytes is None:
                cache_bytes = kv_cache_bytes(options.kv_cache_demand, replicas)
                options = dataclasses.replace(options, kv_cache_bytes=cache_bytes)
            spec = ServerSpec(
                engine_args=options.engine_args(request["model"]),
                environments=environments,
                limits=ServerLimits(**request["limits"]),
                module=request["module"],
            )
            self.servers.start(spec)
        except UserError as error:
            self.status_file.fail(refused=str(error))
        except Exception as error:
            self.status_file.fail(failed=f"servers could not be started: {error}")
            raise

    def status(self) -> dict[str, Any] | None:
        """Return the fields of the servers' ``PoolStatus``; None before ``start_servers``."""
        status = self.status_file.read()
        if status is None:
            return None
        status = dataclasses.replace(
            status,
            refused=self._with_node_name(status.refused),
            failed=self._with_node_name(status.failed),
        )
        return dataclasses.asdict(status)

    def update_weights(self, weights: Iterable[IncomingTensor], version: int) -> None:
        """Store ``weights`` for the servers. When that fails, the servers fail with it."""
        try:
            self.servers.update_weights(weights, version)
        except Exception as error:
            self.status_file.fail(failed=f"the weights of step {version} did not arrive: {error}")
            raise

    def close(self) -> None:
        """End the servers."""
        self.servers.close()

    def add_peer(self, cores: str) -> None:
        """Count another process of this node, and use its ``cores`` (numbers with commas)."""
        self.cores |= {int(core) for core in cores.split(",")}
        self.peers.release()

    def _use_peers_cores(self) -> None:
        """Run on the cores of all the job's processes on this node.

        Slurm may have bound each process to some of them; servers inherit this process's binding.
        """
        deadline = time.monotonic() + PEER_WAIT_S
        for _ in range(self._tasks - 1):
            self.peers.acquire(timeout=max(0.0, deadline - time.monotonic()))
        os.sched_setaffinity(0, self.cores)

    def _with_node_name(self, text: str) -> str:
        return f"node {self._node_name}: {text}" if text else ""
