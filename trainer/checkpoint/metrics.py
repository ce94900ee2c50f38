"""The numbers of ``ckpt/*``, told by the training thread, the copies and the committer."""

from __future__ import annotations

import logging
import threading
import time

log = logging.getLogger(__name__)


class Numbers:
    """Safe to call from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {"failures": 0.0, "stall_s": 0.0, "last_committed_step": -1.0}
        self._last_commit = time.time()
        self.last_failure = ""
        """What the last failed save said."""

    def put(self, **values: float) -> None:
        """Set values."""
        with self._lock:
            self._values |= values

    def add(self, name: str, value: float = 1.0) -> None:
        """Add to a value that begins at 0."""
        with self._lock:
            self._values[name] = self._values.get(name, 0.0) + value

    def get(self, name: str) -> float | None:
        """A value, or None before it was told."""
        with self._lock:
            return self._values.get(name)

    def fail(self, message: str) -> None:
        """A save failed: say so at once in the log, and with the next metrics."""
        log.error("%s", message)
        self.last_failure = message
        self.add("failures")

    def committed(self, step: int, *, nbytes: int, seconds: float) -> None:
        """A checkpoint of ``step`` is committed; ``nbytes``: this rank's share, ``seconds``: since
        its copy.
        """
        with self._lock:
            self._last_commit = time.time()
            self._values |= {
                "write_s": seconds,
                "bytes": float(nbytes),
                "last_committed_step": float(step),
                "write_gbps": nbytes / seconds / 1e9,
            }

    def take(self, in_flight: int) -> dict[str, float]:
        """All of them as metrics; ``stall_s`` begins anew."""
        with self._lock:
            values = {
                **self._values,
                "in_flight": float(in_flight),
                "age_s": time.time() - self._last_commit,
            }
            self._values["stall_s"] = 0.0
        return {f"ckpt/{name}": value for name, value in values.items()}
