"""How a stop that one rank was asked for reaches the others while none of them is in a collective.

A thread of each rank looks at one key of the store in which the ranks met.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from trainer.base import signals

KEY = "stop"
HEARD = "stop/heard"
HEARD_TIMEOUT_S = 2.0
"""How long rank 0, which serves the store, waits at its end for the others to have heard."""
TIMEOUT_S = 10.0


class StopChannel(threading.Thread):
    """Passes this rank's request on to all ranks, and theirs to this one."""

    def __init__(self, store: Store, *, rank: int, size: int) -> None:
        """``store``: a connection of its own, since no call of another thread may delay it."""
        super().__init__(name="stop-channel", daemon=True)
        store.set_timeout(timedelta(seconds=TIMEOUT_S))
        self._store = store
        self._rank = rank
        self._size = size
        self._closing = threading.Event()
        self._heard = False

    def run(self) -> None:
        """Look until closed, until a stop was requested, or until rank 0 is gone."""
        with contextlib.suppress(RuntimeError):
            while not self._heard and not self._closing.wait(signals.POLL_S):
                self._look()

    def close(self) -> None:
        """End the thread; on rank 0 once all ranks have heard of a stop."""
        self._closing.set()
        self.join(TIMEOUT_S)
        with contextlib.suppress(RuntimeError):
            if not self._heard:
                self._look()
            deadline = time.monotonic() + HEARD_TIMEOUT_S
            while self._rank == 0 and self._heard and time.monotonic() < deadline:
                if self._store.add(HEARD, 0) >= self._size:
                    return
                time.sleep(signals.POLL_S / 4)

    def _look(self) -> None:
        cause = signals.requested()
        if cause is not None:
            self._store.set(KEY, cause)
        elif self._store.check([KEY]):
            cause = self._store.get(KEY).decode()
        if cause is not None:
            self._heard = True
            self._store.add(HEARD, 1)
            signals.request(cause)
