"""The ranks' side of servers on nodes that train nothing: requests to those nodes' agents."""

from __future__ import annotations

import http.client
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.base.connections import Address
from trainer.models import LoadedModel
from trainer.ranks.world import World
from trainer.rollout.vllm.client.json_request import send_json, try_send_json
from trainer.rollout.vllm.client.spec import SERVER_MODULE, ServerLimits
from trainer.rollout.vllm.client.status_file import PoolStatus
from trainer.rollout.vllm.engine.model_folder import write_model_folder
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.nodes.agent import servers_folder
from trainer.rollout.vllm.nodes.weight_upload import WeightUpload, encode_tensor

START_TIMEOUT_S = 60.0
"""Of the request that starts servers, which does not wait until they are ready."""
STATUS_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 30.0


class RemotePool:
    """Servers on other nodes: a :class:`trainer.rollout.vllm.client.pool.ServerPool`.

    Local rank 0 of trainer node k sends weights to node agent k, counted around.
    """

    poll_s = 0.25

    def __init__(
        self,
        addresses: Sequence[Address],
        loaded: LoadedModel,
        world: World,
        *,
        local_ranks: int,
        run_dir: Path,
        replicas: int,
        limits: ServerLimits,
        module: str = SERVER_MODULE,
    ) -> None:
        """``addresses``: of all node agents. ``local_ranks``: ranks on each trainer node.

        ``replicas``: servers on each agent's node.
        """
        self.num_slots = len(addresses) * replicas
        self.first_slot = world.rank
        self.location = f"nodes of their own; their logs are in {servers_folder(run_dir, 0).parent}"
        self._addresses = addresses
        self._loaded = loaded
        self._run_dir = run_dir
        self._replicas = replicas
        self._limits = limits
        self._module = module
        nodes = max(1, world.size // local_ranks)
        node = world.rank // local_ranks
        self._own_agents: list[int] = []
        """Agents to which this rank sends weights."""
        if world.local_rank == 0:
            self._own_agents = [k for k in range(len(addresses)) if k % nodes == node]
        self._silent_since: dict[int, float] = {}
        """Since when agents have given no reply."""
        self._failed = ""
        """Why there will be no more servers; empty: not so."""

    @property
    def pids(self) -> list[int]:
        """No process ids: the servers are on other machines."""
        return []

    def start(self, options: Options) -> None:
        """Let the agents of this rank begin to start servers; their status shows the outcome."""
        for k in self._own_agents:
            model = write_model_folder(self._loaded, servers_folder(self._run_dir, k) / "model")
            request = {
                "options": asdict(options),
                "model": str(model),
                "replicas": self._replicas,
                "limits": asdict(self._limits),
                "module": self._module,
            }
            try:
                send_json(self._addresses[k], "POST", "/start", request, timeout_s=START_TIMEOUT_S)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._mark_lost(k, error)

    def status(self) -> PoolStatus | None:
        """Return the status of all agents' servers; None while any is unknown."""
        statuses = [self._agent_status(k) for k in range(len(self._addresses))]
        known = [status for status in statuses if status is not None]
        refused = next((status.refused for status in known if status.refused), "")
        failed = self._failed or next((status.failed for status in known if status.failed), "")
        if len(known) < len(statuses) and not refused and not failed:
            return None
        return PoolStatus(
            slots=[server for status in known for server in status.slots],
            refused=refused,
            failed=failed,
            restarts=sum(status.restarts for status in known),
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send the weights to this rank's agents, to all at once; other ranks only consume them."""
        # An agent replies when its servers have read the older weights.
        timeout_s = self._limits.start_timeout_s + self._limits.timeout_s
        uploads = {
            k: WeightUpload(self._addresses[k], timeout_s=timeout_s) for k in self._own_agents
        }
        with ThreadPoolExecutor(max(1, len(uploads))) as threads, ExitStack() as stack:
            for upload in uploads.values():
                stack.callback(upload.close)
            self._for_each(uploads, threads, lambda upload: upload.begin(version))
            for name, tensor in weights:  # under ZeRO-3 all ranks take part in gathering them
                if uploads:
                    header, data = encode_tensor(name, tensor)
                    self._for_each(uploads, threads, _sender(header, data))
            self._for_each(uploads, threads, lambda upload: upload.end())

    def close(self) -> None:
        """End the servers of this rank's agents."""
        for k in self._own_agents:
            try_send_json(self._addresses[k], "POST", "/close", {}, timeout_s=CLOSE_TIMEOUT_S)

    def _for_each(
        self,
        uploads: dict[int, WeightUpload],
        threads: ThreadPoolExecutor,
        action: Callable[[WeightUpload], None],
    ) -> None:
        """Run ``action`` on all uploads at once; remove those whose agent is lost."""

        def run(k: int) -> None:
            try:
                action(uploads[k])
            except OSError as error:
                self._mark_lost(k, error)
                uploads.pop(k).close()

        apply = threads.map if len(uploads) > 1 else map
        deque(apply(run, list(uploads)), maxlen=0)

    def _agent_status(self, k: int) -> PoolStatus | None:
        """Return the status of agent ``k``'s servers; None when it is unknown or lost."""
        if self._failed:
            return None
        try:
            reply = send_json(self._addresses[k], "GET", "/status", timeout_s=STATUS_TIMEOUT_S)
        except ConnectionRefusedError as error:
            self._mark_lost(k, error)
            return None
        except (OSError, http.client.HTTPException, ValueError) as error:
            since = self._silent_since.setdefault(k, time.monotonic())
            if time.monotonic() - since > self._limits.timeout_s:
                self._mark_lost(k, error)
            return None
        self._silent_since.pop(k, None)
        if reply is None:
            return None
        if "slots" not in reply:  # another process listens at this address now
            self._mark_lost(k, OSError(str(reply)))
            return None
        return PoolStatus.from_dict(reply)

    def _mark_lost(self, k: int, error: Exception) -> None:
        """Fail because of agent ``k``, for the reason that it gives itself, or ``error``."""
        reply: dict[str, Any] | None = None
        if not isinstance(error, ConnectionRefusedError):
            reply = try_send_json(self._addresses[k], "GET", "/status", timeout_s=STATUS_TIMEOUT_S)
        reason = "" if reply is None else str(reply.get("failed", ""))
        self._failed = self._failed or reason or f"{self._agent_name(k)} is lost: {error}"

    def _agent_name(self, k: int) -> str:
        address = self._addresses[k]
        return (
            f"the node agent of vLLM servers at {address.host}:{address.port} (number {k} of the "
            "job's last nodes)"
        )


def _sender(header: bytes, data: memoryview) -> Callable[[WeightUpload], None]:
    return lambda upload: upload.send(header, data)
