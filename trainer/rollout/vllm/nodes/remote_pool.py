"""The ranks' way to servers on nodes of their own, each of which a host keeps
(:mod:`trainer.rollout.vllm.nodes.agent`).
"""

from __future__ import annotations

import http.client
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.launch.rollout_nodes import Address
from trainer.models import LoadedModel
from trainer.ranks.world import World
from trainer.rollout.vllm.client.pool import SERVE
from trainer.rollout.vllm.client.status_file import State
from trainer.rollout.vllm.client.supervisor import Limits, ask, request
from trainer.rollout.vllm.engine.model_folder import write_model_folder
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.nodes.agent import folder_of
from trainer.rollout.vllm.nodes.weight_upload import Upload, parts

BEGIN_S, STATE_S, CLOSE_S = 60.0, 5.0, 30.0
"""Longest waits for a host's answer; it begins without waiting for its servers."""


class Hosts:
    """Servers on other nodes. Host k is fed by local rank 0 of trainer node k, counted around."""

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
        limits: Limits,
        module: str = SERVE,
    ) -> None:
        """``local_ranks``: on each trainer node; ``replicas``: on each host's."""
        self.seats, self.first = len(addresses) * replicas, world.rank
        self.place = f"nodes of their own; their logs are in {folder_of(run_dir, 0).parent}"
        self._addresses, self._loaded, self._run_dir = addresses, loaded, run_dir
        self._replicas, self._limits, self._module = replicas, limits, module
        nodes, mine = max(1, world.size // local_ranks), world.rank // local_ranks
        self._fed = [
            k for k in range(len(addresses)) if world.local_rank == 0 and k % nodes == mine
        ]
        self._silent: dict[int, float] = {}
        """Hosts that gave no answer, and since when."""
        self._lost = ""

    @property
    def pids(self) -> list[int]:
        """See :class:`trainer.rollout.vllm.client.pool.Fleet`."""
        return []

    def start(self, options: Options) -> None:
        """See :class:`trainer.rollout.vllm.client.pool.Fleet`."""
        for k in self._fed:
            model = write_model_folder(self._loaded, folder_of(self._run_dir, k) / "model")
            order = {
                "options": asdict(options),
                "model": str(model),
                "replicas": self._replicas,
                "limits": asdict(self._limits),
                "module": self._module,
            }
            try:
                request(
                    self._addresses[k], "POST", "/begin", order, timeout_s=BEGIN_S
                )  # its state tells what came of it
            except (OSError, http.client.HTTPException, ValueError) as error:
                self._lose(k, error)

    def read(self) -> State | None:
        """See :class:`trainer.rollout.vllm.client.pool.Fleet`."""
        states = [self._state(k) for k in range(len(self._addresses))]
        known = [state for state in states if state is not None]
        refused = next((state.refused for state in known if state.refused), "")
        failed = self._lost or next((state.failed for state in known if state.failed), "")
        if len(known) < len(states) and not refused and not failed:
            return None
        return State(
            seats=[seat for state in known for seat in state.seats],
            refused=refused,
            failed=failed,
            restarts=sum(state.restarts for state in known),
        )

    def take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`trainer.rollout.vllm.client.pool.Fleet`."""
        patience = (
            self._limits.start_timeout_s + self._limits.timeout_s
        )  # a server may be reading the old ones
        uploads: dict[int, Upload] = {}

        def guarded(step: Callable[[int], None], k: int) -> None:
            try:
                step(k)
            except OSError as error:
                self._lose(k, error)
                uploads.pop(k).close()

        with ThreadPoolExecutor(max(1, len(self._fed))) as pool:

            def each(step: Callable[[int], None]) -> None:
                run = pool.map if len(uploads) > 1 else map
                deque(run(partial(guarded, step), list(uploads)), maxlen=0)

            try:
                uploads |= {k: Upload(self._addresses[k], timeout_s=patience) for k in self._fed}
                each(lambda k: uploads[k].begin(version))
                for (
                    name,
                    tensor,
                ) in weights:  # under ZeRO 3 all ranks gather, those too that send nothing
                    if uploads:
                        each(
                            partial(
                                lambda head, data, k: uploads[k].send(head, data),
                                *parts(name, tensor),
                            )
                        )
                each(lambda k: uploads[k].end())
            finally:
                for upload in uploads.values():
                    upload.close()

    def close(self) -> None:
        """See :class:`trainer.rollout.vllm.client.pool.Fleet`."""
        for k in self._fed:
            ask(self._addresses[k], "POST", "/close", {}, timeout_s=CLOSE_S)

    def _state(self, k: int) -> State | None:
        if self._lost:
            return None
        try:
            found = request(self._addresses[k], "GET", "/state", timeout_s=STATE_S)
            self._silent.pop(k, None)
        except ConnectionRefusedError as error:
            self._lose(k, error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            since = self._silent.setdefault(k, time.monotonic())
            if time.monotonic() - since > self._limits.timeout_s:
                self._lose(k, error)
        else:
            if found is None:
                return None
            if "seats" in found:
                return State.of(found)
            self._lose(k, OSError(str(found)))  # another process listens there now
        return None

    def _lose(self, k: int, error: Exception) -> None:
        found = (
            None if isinstance(error, ConnectionRefusedError) else self._ask_state(k)
        )  # it may know better
        told = "" if found is None else str(found.get("failed", ""))
        self._lost = self._lost or told or f"{self._name(k)} is lost: {error}"

    def _ask_state(self, k: int) -> dict[str, Any] | None:
        return ask(self._addresses[k], "GET", "/state", timeout_s=STATE_S)

    def _name(self, k: int) -> str:
        address = self._addresses[k]
        return f"the host of vLLM servers at {address.host}:{address.port} (number {k} of the job's last nodes)"
