"""How the committer threads of the ranks exchange messages.

Not by collectives: those belong to the training threads, and none of these waits may block them.
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

from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from trainer.ranks.listening import listening_store
from trainer.ranks.world import World

POLL_S = 0.01
MAX_POLL_S = 0.1
FINISH_TIMEOUT_S = 10.0
_ACKNOWLEDGED = "acknowledged"


class CommitTimeout(Exception):
    """A rank did not answer; the message names it."""


class CommitStore:
    """Small JSON messages by topic and rank, in a TCP store on rank 0 of its own.

    Making one is collective; afterwards no call waits without a time limit.
    """

    def __init__(self, world: World, *, timeout_s: float) -> None:
        self.rank = world.rank
        self.world_size = world.size
        self._timeout_s = timeout_s
        self._store: Store = HashStore() if world.size == 1 else _tcp_store(world)

    def put(self, topic: str, message: Any) -> None:
        """Store ``message`` of this rank. Raises CommitTimeout when rank 0 is gone."""
        try:
            self._store.set(f"{topic}/{self.rank}", json.dumps(message))
        except RuntimeError as error:
            raise _rank_0_is_gone(error) from error

    def get(
        self,
        topic: str,
        rank: int,
        cancelled: Callable[[], bool] = lambda: False,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Wait for the message of ``rank``, at most ``timeout_s`` (default: the store's).

        Raises CommitTimeout: out of time, cancelled, or rank 0 is gone.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        key = f"{topic}/{rank}"
        pause_s = POLL_S
        while True:
            try:
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
            except RuntimeError as error:
                raise _rank_0_is_gone(error) from error
            if time.monotonic() > deadline or cancelled():
                raise CommitTimeout(f"waited for rank {rank} in vain ({topic})")
            time.sleep(pause_s)
            pause_s = min(MAX_POLL_S, pause_s * 1.5)

    def acknowledge(self, subject: str) -> None:
        """Tell rank 0 that this rank has its last message about ``subject``.

        Raises CommitTimeout when rank 0 is gone.
        """
        self.put(f"{_ACKNOWLEDGED}/{subject}", True)

    def finish(self, subject: str, topics: tuple[str, ...]) -> None:
        """On rank 0: wait for the other ranks' acknowledgements, then delete all messages.

        The store ends with this process: ranks that still wait would take that for a failure.
        """
        with contextlib.suppress(CommitTimeout):
            for rank in range(1, self.world_size):
                self.get(f"{_ACKNOWLEDGED}/{subject}", rank, timeout_s=FINISH_TIMEOUT_S)
        with contextlib.suppress(RuntimeError):
            for rank in range(self.world_size):
                for topic in (*topics, _ACKNOWLEDGED):
                    self._store.delete_key(f"{topic}/{subject}/{rank}")


def _rank_0_is_gone(error: RuntimeError) -> CommitTimeout:
    return CommitTimeout(f"rank 0 is gone ({str(error).splitlines()[0]})")


def _tcp_store(world: World) -> Store:
    """A store that rank 0 serves on a free port. Collective."""
    timeout = timedelta(seconds=300)
    address: tuple[str, int] | None = None
    store: Store | None = None
    if world.is_main:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        one_node = world.local_size == world.size
        store = listening_store(host, 0, ranks=world.size, one_node=one_node, timeout=timeout)
        address = (host, store.port)
    host, port = world.broadcast(address)
    if store is None:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store
