"""The status of a node's servers, which the process that starts them writes for the other ranks."""

from __future__ import annotations

import socket
import threading
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.connections import Address
from trainer.base.json_files import read_object


@dataclass(frozen=True, kw_only=True)
class ServerStatus:
    """The server in one slot; after a restart another server is in the same slot."""

    address: Address | None
    """None while it is not ready."""
    version: int | None
    """Of its weights. None: it has none yet."""
    incarnation: int
    """How often a server has been started in this slot."""


@dataclass(frozen=True, kw_only=True)
class PoolStatus:
    """All servers of a node, or of several nodes."""

    slots: list[ServerStatus]
    refused: str = ""
    """Why there will be no more servers, for the user to fix; empty: not so."""
    failed: str = ""
    """Why a server could not be restarted; empty: not so."""
    restarts: int = 0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PoolStatus:
        """Build the status from the result of ``dataclasses.asdict``."""
        slots = []
        for slot in values["slots"]:
            address = None if slot["address"] is None else Address(**slot["address"])
            slots.append(ServerStatus(**{**slot, "address": address}))
        return cls(**{**values, "slots": slots})


class StatusFile:
    """The file with a node's :class:`PoolStatus`: private, and replaced as a whole.

    One process writes it, from several threads.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{socket.gethostname()}-{name}.json"
        self._lock = threading.Lock()
        self._status: PoolStatus | None = None

    def create(self, slots: int) -> None:
        """Write the file with servers that are not ready."""
        empty = ServerStatus(address=None, version=None, incarnation=0)
        self._write(PoolStatus(slots=[empty] * slots))

    def update(self, slot: int, server: ServerStatus, *, restarted: bool = False) -> None:
        """Replace the status of one server; ``restarted`` counts a restart."""
        with self._lock:
            status = self._created()
            slots = list(status.slots)
            slots[slot] = server
            self._write(replace(status, slots=slots, restarts=status.restarts + int(restarted)))

    def fail(self, *, refused: str = "", failed: str = "") -> None:
        """Tell all ranks that there will be no more servers, and why."""
        with self._lock:
            self._write(replace(self._created(), refused=refused, failed=failed))

    def read(self) -> PoolStatus | None:
        """Return the status, None before there is one."""
        try:
            return PoolStatus.from_dict(read_object(self.path))
        except (KeyError, TypeError):
            return None

    def _created(self) -> PoolStatus:
        if self._status is None:
            raise RuntimeError("the status file has not been created")
        return self._status

    def _write(self, status: PoolStatus) -> None:
        self._status = status
        # Not durable: servers do not outlive a restart of their machine.
        atomic.write_json(self.path, asdict(status), durable=False)
