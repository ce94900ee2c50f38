"""How the ranks' committers meet, off the training threads and apart from the training's collectives."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError, HashStore, Store, TCPStore  # type: ignore[attr-defined]

POLL_S = 0.01
MAX_POLL_S = 0.1


class OutOfTime(Exception):
    """Nobody answered; the message names whom it waited for."""


class Meeting:
    """Small JSON messages under names, in a TCP store of its own on rank 0. Collective to make; then never blocking."""

    def __init__(self, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self._store: Store = HashStore() if size == 1 else _tcp_store(rank)

    def tell(self, name: str, message: Any) -> None:
        """Leave ``message`` under ``name`` and this rank."""
        self._store.set(f"{name}/{self.rank}", json.dumps(message))

    def hear(self, name: str, rank: int, cancelled: Callable[[], bool] = lambda: False) -> Any:
        """What ``rank`` left under ``name``. Raises OutOfTime."""
        key, until, pause = f"{name}/{rank}", time.monotonic() + self.timeout_s, POLL_S
        while True:
            try:
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
            except (RuntimeError, DistError) as error:
                raise OutOfTime(f"rank 0 is gone ({str(error).splitlines()[0]})") from error
            if time.monotonic() > until or cancelled():
                raise OutOfTime(f"waited for rank {rank} in vain ({name})")
            time.sleep(pause)
            pause = min(MAX_POLL_S, pause * 1.5)

    def forget(self, name: str) -> None:
        """Drop this rank's message."""
        try:
            self._store.delete_key(f"{name}/{self.rank}")
        except (RuntimeError, DistError):
            return


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
        store = TCPStore(address[0][0], address[0][1], is_master=False, wait_for_workers=False, timeout=timeout)
    return store
