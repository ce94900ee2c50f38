"""What the servers of one node are, told from the rank that keeps them to the others through a
file.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.launch.rollout_nodes import Address

TOKEN_BYTES = 32
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One server as it stands."""

    address: Address | None
    """None while it is not up."""
    version: int | None
    """Of its weights. None: none yet."""
    incarnation: int
    """How often it has been started."""


@dataclass(frozen=True, kw_only=True)
class State:
    """All servers of a node, or of several, and why there will be no more of them."""

    seats: list[Seat]
    refused: str = ""
    """What the user has to mend."""
    failed: str = ""
    """Why an engine could not be brought back."""
    restarts: int = 0

    @staticmethod
    def of(found: dict[str, Any]) -> State:
        """From what ``asdict`` made of one."""
        seats = [
            Seat(**{**s, "address": s["address"] and Address(**s["address"])})
            for s in found["seats"]
        ]
        return State(**{**found, "seats": seats})


class Notice:
    """The file with the node's state, private and replaced whole. Written by one rank, from several
    threads.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{socket.gethostname()}-{name}.json"
        self._lock = threading.Lock()
        self._state: State | None = None

    def begin(self, seats: int) -> None:
        """Nothing is up yet."""
        self._write(State(seats=[Seat(address=None, version=None, incarnation=0)] * seats))

    def sit(self, number: int, seat: Seat, *, restarted: bool = False) -> None:
        """Server ``number`` stands so now."""
        with self._lock:
            state = self._known()
            seats = [seat if i == number else s for i, s in enumerate(state.seats)]
            self._write(_changed(state, seats=seats, restarts=state.restarts + restarted))

    def give_up(self, *, refused: str = "", failed: str = "") -> None:
        """There will be no engine."""
        with self._lock:
            self._write(_changed(self._known(), refused=refused, failed=failed))

    def read(self) -> State | None:
        """The state, or None before there is one."""
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return None
        return State.of(found)

    def _known(self) -> State:
        if self._state is None:
            raise RuntimeError("begin comes first")
        return self._state

    def _write(self, state: State) -> None:
        self._state = state
        temp = self.path.with_suffix(".tmp")
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w") as file:
            json.dump(asdict(state), file)
        temp.replace(self.path)


def _changed(state: State, **changes: object) -> State:
    return State(**{**state.__dict__, **changes})
