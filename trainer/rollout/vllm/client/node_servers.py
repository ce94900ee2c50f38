"""All servers of one node, started and supervised by one process of the node."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from trainer.rollout.vllm.client.spec import ServerSpec
from trainer.rollout.vllm.client.status_file import StatusFile
from trainer.rollout.vllm.client.supervisor import ServerSupervisor
from trainer.rollout.vllm.client.weight_store import WeightStore
from trainer.rollout.vllm.engine.shared_weights import IncomingTensor


class NodeServers:
    """The servers that this process supervises, and the weights they share. They end with it.

    ``folder`` is private and holds their logs. They listen on address ``host``, to clients that
    know ``token``.
    """

    def __init__(self, folder: Path, status_file: StatusFile, *, host: str, token: str) -> None:
        self.folder = folder
        self.status_file = status_file
        self.weights = WeightStore()
        self.supervisors: list[ServerSupervisor] = []
        self._host = host
        self._token = token

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers."""
        pids = [supervisor.pid for supervisor in self.supervisors]
        return [pid for pid in pids if pid is not None]

    def start(self, spec: ServerSpec) -> None:
        """Begin to start the servers; the status file shows when they are ready."""
        count = len(spec.environments)
        self.status_file.create(count)
        for slot in range(count):
            supervisor = ServerSupervisor(
                slot,
                spec,
                folder=self.folder,
                status_file=self.status_file,
                host=self._host,
                token=self._token,
                weights=self.weights,
            )
            self.supervisors.append(supervisor)
            supervisor.start()

    def update_weights(self, weights: Iterable[IncomingTensor], version: int) -> None:
        """Store ``weights``; the servers begin to read them when this returns."""
        self.weights.write(weights, version)
        for supervisor in self.supervisors:
            supervisor.weights_changed()

    def close(self) -> None:
        """End all servers and release the weights. May be called twice."""
        if self.supervisors:
            self.status_file.fail(failed="the engine was closed")
        for supervisor in self.supervisors:
            supervisor.close()
        self.supervisors = []
        self.weights.shared.close()
