"""How the ranks' committers meet, off the training threads and apart from the training's
collectives.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

POLL_S = 0.01
MAX_POLL_S = 0.1
PARTING_S = 10.0


class OutOfTime(Exception):
    """Nobody answered; the message names whom it waited for."""


class Meeting:
    """Small JSON messages under names, in a TCP store of its own on rank 0. Collective to make;
    then never blocking.
    """

    def __init__(self, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store: Store = HashStore() if size == 1 else _tcp_store(rank)

    def tell(self, name: str, message: Any) -> None:
        """Leave ``message`` under ``name`` and this rank. Raises OutOfTime when rank 0 is gone."""
        try:
            self._store.set(f"{name}/{self.rank}", json.dumps(message))
        except RuntimeError as error:
            raise OutOfTime(f"rank 0 is gone ({str(error).splitlines()[0]})") from error

    def hear(
        self,
        name: str,
        rank: int,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        limit_s: float | None = None,
    ) -> Any:
        """What ``rank`` left under ``name``; waits at most ``limit_s`` (default: the meeting's).
        Raises OutOfTime.
        """
        until = time.monotonic() + (self.timeout_s if limit_s is None else limit_s)
        key, pause = f"{name}/{rank}", POLL_S
        while True:
            try:
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
            except RuntimeError as error:
                raise OutOfTime(f"rank 0 is gone ({str(error).splitlines()[0]})") from error
            if time.monotonic() > until or cancelled():
                raise OutOfTime(f"waited for rank {rank} in vain ({name})")
            time.sleep(pause)
            pause = min(MAX_POLL_S, pause * 1.5)

    def part(self, name: str, words: tuple[str, ...]) -> None:
        """Rank 0, when it has told the outcome: wait until the others have heard it, since the
        store ends with this process, and they would take the end for a failure. Then drop all that
        was said.
        """
        with contextlib.suppress(OutOfTime):
            for rank in range(1, self.size):
                self.hear(f"heard/{name}", rank, limit_s=PARTING_S)
        with contextlib.suppress(RuntimeError):
            for rank in range(self.size):
                for word in (*words, "heard"):
                    self._store.delete_key(f"{word}/{name}/{rank}")


def _tcp_store(rank: int) -> Store:
    timeout = timedelta(seconds=300)
    address: list[Any] = [None]
    store: Store | None = None
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        address = [(host, store.port)]
    dist.broadcast_object_list(address, src=0, device=torch.device("cpu"))
    if store is None:
        store = TCPStore(
            address[0][0], address[0][1], is_master=False, wait_for_workers=False, timeout=timeout
        )
    return store
