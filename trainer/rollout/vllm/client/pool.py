"""The servers among which a rank distributes its prompts, and those of its own node."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from trainer.base.connections import LOOPBACK, new_token
from trainer.models import LoadedModel
from trainer.ranks.world import World
from trainer.rollout.vllm.client.node_servers import NodeServers
from trainer.rollout.vllm.client.spec import SERVER_MODULE, ServerLimits, ServerSpec
from trainer.rollout.vllm.client.status_file import PoolStatus, StatusFile
from trainer.rollout.vllm.engine.model_folder import make_private, write_model_folder
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.shared_weights import incoming_tensors

NONCE_BITS = 48


class ServerPool(Protocol):
    """The servers that a rank uses. All ranks call ``start``, ``update_weights`` and ``close``."""

    num_slots: int
    """Number of servers."""
    first_slot: int
    """The server that gets this rank's first prompt."""
    location: str
    """Where the servers are, for messages."""
    poll_s: float
    """Longest time between two reads of their status while waiting, seconds."""

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers that this process supervises."""

    def start(self, options: Options) -> None:
        """Begin to start the servers."""

    def status(self) -> PoolStatus | None:
        """Return the servers' status; None before it is known."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand over the weights. All of them are consumed, even when a server is lost."""

    def close(self) -> None:
        """End the servers."""


class LocalPool:
    """The servers on this rank's node, which local rank 0 supervises."""

    poll_s = 0.05

    def __init__(
        self,
        loaded: LoadedModel,
        world: World,
        *,
        folder: Path,
        environments: Sequence[dict[str, str]],
        limits: ServerLimits,
        module: str = SERVER_MODULE,
    ) -> None:
        """``folder`` is private, and the same for all ranks of the node.

        ``environments`` holds for each server the variables that assign it cores or GPUs.
        """
        self.num_slots = len(environments)
        self.first_slot = world.local_rank
        self.location = f"this node; their logs are in {folder}"
        self.servers: NodeServers | None = None
        self._loaded = loaded
        self._world = world
        self._folder = folder
        self._environments = environments
        self._limits = limits
        self._module = module
        self._status_file: StatusFile | None = None

    @property
    def pids(self) -> list[int]:
        """Process ids of the servers, on local rank 0; empty on other ranks."""
        return [] if self.servers is None else self.servers.pids

    def start(self, options: Options) -> None:
        """Begin to start the servers, on local rank 0."""
        # The status file of an earlier attempt has another name, and is never taken for this one's.
        nonces = self._world.vector(float(secrets.randbits(NONCE_BITS)))
        nonce = int(nonces[self._world.rank - self._world.local_rank])
        make_private(self._folder)
        self._status_file = StatusFile(self._folder, f"{nonce:x}")
        if self._world.local_rank == 0:
            model = write_model_folder(self._loaded, self._folder / "model")
            self.servers = NodeServers(
                self._folder, self._status_file, host=LOOPBACK, token=new_token()
            )
            spec = ServerSpec(
                engine_args=options.engine_args(str(model)),
                environments=self._environments,
                limits=self._limits,
                module=self._module,
            )
            self.servers.start(spec)

    def status(self) -> PoolStatus | None:
        """Return the servers' status; None before ``start``."""
        return None if self._status_file is None else self._status_file.read()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand over the weights, on local rank 0; other ranks only consume them."""
        if self.servers is not None:
            self.servers.update_weights(incoming_tensors(weights), version)
        else:
            deque(weights, maxlen=0)  # under ZeRO-3 all ranks take part in gathering them

    def close(self) -> None:
        """End the servers."""
        if self.servers is not None:
            self.servers.close()
